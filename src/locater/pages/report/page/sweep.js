/* A sweep, a run, a file of metrics. */

function sweepSection(section) {
  const pair = new Pair(section);
  const ended = sortable(columnsOf(section.last), { label: "members at their last record", all: true });
  return [
    ...claimsPart(section),
    ...curvesPart(section),
    ...(section.rho ? rhoPart(pair) : []),
    ...spectraPart(pair),
    el("h3", "Where they ended"),
    ended,
  ];
}

function claimsPart({ claims, claims_note: note }) {
  if (claims) return [el("h3", "Claims"), ...claimsTable(claims, note)];
  return note ? [el("h3", "Claims"), el("p.note", note)] : [];
}

/** Columns of a table as they come in the data. */
function columnsOf(columns) {
  return columns.map(({ name, numbers, words }) => ({
    name: name === "tr W" ? "tr W_QK" : name,
    values: numbers ?? words,
    words: !numbers,
  }));
}
