/* What the doctor says. */

function diagnosisSection({ healthy, sentences, findings }) {
  const said = sentences.map((sentence) => el(`p.says${healthy ? ".well" : ""}`, sentence));
  if (healthy) return said;
  const heads = ["sickness", "where", "seen", "what to do"].map((name) => el("th", { scope: "col" }, name));
  const line = (row) => {
    const where = row.heads ? `${row.module}, head ${row.heads}` : row.module;
    const todo = [`${row.advice[0].toUpperCase()}${row.advice.slice(1)} (cost: ${row.cost}).`, el("code", row.code)];
    return el(
      "tr",
      el("td.statement", row.kind, el("br"), el(`span.verdict-${row.sure === "sure" ? "no" : "open"}`, row.sure)),
      el("td.where", where),
      el("td.measured", row.evidence),
      el("td.todo", todo),
    );
  };
  return [
    ...said,
    el("h3", "Findings"),
    el("table.claims", el("thead", el("tr", heads)), el("tbody", findings.map(line))),
  ];
}
