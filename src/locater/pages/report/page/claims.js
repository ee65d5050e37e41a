/* The paper's claims and what a sweep says of them. */

const VERDICTS = new Map([
  ["reproduced", "yes"],
  ["not reproduced", "no"],
  ["cannot tell", "open"],
]);

function verdicts(rows) {
  const heads = ["the paper says", "where", "measured", "verdict"].map((name) => el("th", { scope: "col" }, name));
  const line = (row) => {
    const mark = el(`span.verdict-${VERDICTS.get(row.verdict) ?? "open"}`, row.verdict);
    const cells = [el("td.where", row.where), el("td.measured", math(row.measured)), el("td.verdict", mark)];
    return el("tr", el("td.statement", math(row.statement)), cells);
  };
  return el("table.claims", el("thead", el("tr", heads)), el("tbody", rows.map(line)));
}

function claimsTable(rows, note) {
  const counts = [...VERDICTS.keys()]
    .map((verdict) => [rows.filter((row) => row.verdict === verdict).length, verdict])
    .filter(([count]) => count);
  const more = note ? ` ${note[0].toUpperCase()}${note.slice(1)}.` : "";
  const sum = el("p.sum", `Of ${rows.length}: ${counts.map((each) => each.join(" ")).join(", ")}.${more}`);
  const open = rows.filter((row) => row.verdict === "cannot tell");
  if (open.length <= rows.length / 2) return [sum, verdicts(rows)];
  // a small sweep decides little; what it does not is not put first
  const rest = rows.filter((row) => row.verdict !== "cannot tell");
  const folded = el("details", el("summary", `${open.length} that this sweep cannot tell`), verdicts(open));
  return rest.length ? [sum, verdicts(rest), folded] : [sum, folded];
}
