/* The page: a head, a section for each thing, then the plots. */

const KINDS = {
  diagnosis: ["diagnosis", diagnosisSection],
  sweep: ["training", sweepSection],
  scan: ["scan", scanSection],
  measurement: ["measurement", measurementSection],
  log: ["attention in training", logSection],
  prediction: ["prediction", predictionSection],
  claims: ["claims", (section) => claimsTable(section.claims)],
  table: ["training", (section) => [sortable(columnsOf(section.columns), { label: "members", all: true })]],
};

function sectionOf(section, index) {
  const [kind, make] = KINDS[section.kind];
  return el(
    "section",
    { id: `s${index}` },
    el("header", el("p.kind", kind), el("h2", section.title), el("p.source", section.source)),
    section.facts.length
      ? el(
          "dl.facts",
          section.facts.map(([name, value]) => el("div", el("dt", name), el("dd", value))),
        )
      : null,
    section.notes.length
      ? el(
          "ul.notes",
          { "aria-label": "remarks" },
          section.notes.map((note) => el("li", note)),
        )
      : null,
    make(section),
  );
}

const app = document.getElementById("app");
const toggle = el(
  "button.plain.theme",
  { type: "button", onclick: () => ((themeName = theme().name === "dark" ? "light" : "dark"), showTheme()) },
  "light / dark",
);
const links = DATA.sections.map((section, index) =>
  el("a", { href: `#s${index}` }, el("span", section.title), el("small", KINDS[section.kind][0])),
);

ROOT.dataset.theme = theme().name;
app.append(
  el(
    "div.top",
    el("span.brand", "locater"),
    links.length > 1 ? el("nav", { "aria-label": "sections" }, links) : null,
    toggle,
  ),
  el(
    "main",
    DATA.sections.map(sectionOf),
    DATA.passed.length
      ? el(
          "section.passed",
          el("h2", "Passed over"),
          el(
            "ul",
            DATA.passed.map((each) => el("li", each)),
          ),
        )
      : null,
  ),
  el("footer", `Made by locater ${DATA.version}. This file is complete: it fetches nothing and sends nothing.`),
);
startPlots();
