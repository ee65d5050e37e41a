/* Alarms with their reasons. */

/** A heading and a table; a sentence if there are none, nothing if nobody looked. */
function alarmsPart(alarms, none) {
  if (alarms === null) return [];
  if (!alarms.length) return [el("h3", "Alarms"), el("p.note", none)];
  const words = { step: false, kind: true, module: true, head: false, reason: true };
  const columns = Object.keys(words)
    .map((name) => ({
      name,
      words: words[name],
      digits: 9,
      values: alarms.map((alarm) => (alarm[name] === "" ? null : alarm[name])),
    }))
    .filter(({ values }) => values.some((value) => value != null));
  const table = sortable(columns, { label: "alarms" });
  table.classList.add("alarms");
  return [el("h3", "Alarms"), table];
}
