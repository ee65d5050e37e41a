/* A measurement: maps, one head by position, softmax and ρ measured against predicted, alarms, a table. */

const MEASURED_MAPS = [
  ["entropy_share", "entropy, as a share of the largest possible"],
  ["max_logit", "largest logit"],
];
const MEASURED_COLUMNS = [
  ["entropy", "entropy, nats"],
  ["entropy_share", "entropy share"],
  ["max_logit", "largest logit"],
  ["logsumexp", "log-sum-exp"],
];

function measurementSection(section) {
  const { columns } = section;
  const chosen = new Chosen(section, columns.entropy_share ?? columns.entropy, -1);
  const there = MEASURED_MAPS.filter(([name]) => columns[name]);
  const maps = there.map(([name, title]) =>
    captioned([title], headMap(section, title, columns[name], "plain", chosen)),
  );
  const shown = MEASURED_COLUMNS.filter(([name]) => columns[name]);
  const sorted = shown.findIndex(([name]) => name === "entropy_share");
  const sides = [section.entropy && entropyByQuery(section, chosen), section.rho && rhoByKey(section, chosen)];
  return [
    el("h3", "Layer × head"),
    el("p.note.hint", "Click a head to follow it below."),
    el("div.pair", maps),
    el("h3", "By position"),
    chosen.selects(),
    chosen.title(),
    el("div.pair", sides),
    section.rho ? [rhoByLayer(section), rhoNote()] : [],
    section.softmax ? softmaxPart(section, chosen) : [],
    section.predicted ? predictedPart(section, chosen) : [],
    alarmsPart(section.alarms, "None since the measurement it was compared with."),
    el("h3", "All heads"),
    headTable(section, shown, chosen, { column: 2 + Math.max(sorted, 0), down: false }),
  ].flat();
}
