/* ρ measured against ρ predicted. */

const LAWS = { general: "general law", separable: "K ⊗ Σ", walk: "random walk" };
const LAW_SWATCHES = { general: "first", separable: "second dashed", walk: "third dotted" };

function lawLine(law) {
  const t = theme();
  const looks = { general: [t.first, "solid"], separable: [t.second, "5px,3px"], walk: [t.third, "2px,2px"] };
  return { color: looks[law][0], dash: looks[law][1], width: 2 };
}

function lawKeys(predicted) {
  return predicted.laws.map((law) => [swatch(LAW_SWATCHES[law]), LAWS[law]]);
}

/** One head: measured as points, each law as a line. */
function lawTraces(section, row) {
  const { positions, laws, modules } = section.predicted;
  const own = modules[section.grid.module[row]];
  if (!own) return [];
  const of = (name) => Array.from(part(own[name], section.grid.head[row]));
  const lines = laws
    .filter((law) => own[law])
    .map((law) => ({ type: "scatter", mode: "lines", x: positions, y: of(law), name: LAWS[law], line: lawLine(law) }));
  return [measuredPoints(positions, of("measured")), ...lines];
}

/** All heads and keys counted on a grid, the chosen head as points. */
function agreement(section, chosen, state) {
  const { counts, laws, modules } = section.predicted;
  return new Figure("ρ measured against ρ predicted", 380, () => {
    const t = theme();
    const law = laws[state.law];
    const size = counts[law].length;
    const centres = range(size).map((k) => (k + 0.5) / size);
    const colours = t.name === "dark" ? ["#2d3842", "#d9ecff"] : ["#dbe7f2", "#08306b"];
    const map = {
      type: "heatmap",
      x: centres,
      y: centres,
      z: counts[law].map((row) => row.map((count) => (count ? Math.log10(count) : null))),
      text: counts[law].map((row) => row.map(String)),
      colorscale: colours.map((colour, index) => [index, colour]),
      colorbar: { ...colourBar("pairs"), tickprefix: "10<sup>", ticksuffix: "</sup>", dtick: 1 },
      hovertemplate: "predicted %{x:.2f}, measured %{y:.2f}<br>%{text} pairs<extra></extra>",
    };
    const own = modules[section.grid.module[chosen.row]];
    const of = (name) => (own?.[name] ? Array.from(part(own[name], section.grid.head[chosen.row])) : []);
    const head = {
      type: "scatter",
      mode: "markers",
      x: of(law),
      y: of("measured"),
      name: escaped(headName(section, chosen.row)),
      marker: { color: t.alarm, size: 5, opacity: 0.85, line: { color: t.surface, width: 0.5 } },
      hovertemplate: "<b>%{fullData.name}</b><br>predicted %{x:.3f}, measured %{y:.3f}<extra></extra>",
    };
    const diagonal = { type: "line", x0: 0, y0: 0, x1: 1, y1: 1, line: { color: t.text, width: 1, dash: "4px,3px" } };
    const square = { range: [0, 1], constrain: "domain" };
    return {
      data: [map, head],
      layout: {
        shapes: [diagonal],
        xaxis: axis("ρ predicted", square),
        yaxis: axis("ρ measured", { ...square, scaleanchor: "x" }),
        margin: { r: BESIDE_BAR },
      },
    };
  });
}

function errorsByLayer(section) {
  const { laws, modules } = section.predicted;
  return new Figure("mean distance of predictions from what was measured, by layer", 380, () => {
    const line = (y, name, look, mode) => ({
      type: "scatter",
      mode,
      x: range(modules.length),
      y,
      name,
      line: look,
      marker: { size: 5 },
      hovertemplate: "<b>%{fullData.name}</b><br>layer %{x}<br>%{y:.4f}<extra></extra>",
    });
    const by = (law) => modules.map((module) => module?.errors[law] ?? null);
    const alone = modules.map((module) => module?.sampling ?? null);
    return {
      data: [
        ...laws.map((law) => line(by(law), LAWS[law], lawLine(law), "lines+markers")),
        line(alone, "counting alone", { color: theme().muted, width: 1.2, dash: "4px,3px" }, "lines"),
      ],
      layout: {
        xaxis: layerAxis(modules.length),
        yaxis: axis("mean |predicted − measured|", { rangemode: "tozero" }),
      },
    };
  });
}

function predictedPart(section, chosen) {
  const { predicted } = section;
  const state = { law: 0 };
  const against = agreement(section, chosen, state);
  chosen.following.push(against);
  const set = (index) => {
    state.law = index;
    against.refresh();
  };
  return [
    el("h3", "ρ measured against ρ predicted"),
    el(
      "div.controls",
      choice(
        "law",
        predicted.laws.map((law) => LAWS[law]),
        0,
        set,
      ),
    ),
    el(
      "div.pair",
      captioned(["all heads and keys, counted"], against, legend([swatch("alarm point"), chosen.name()])),
      captioned(
        ["mean distance by layer"],
        errorsByLayer(section),
        legend(...lawKeys(predicted), [swatch("muted dashed"), "counting alone"]),
      ),
    ),
    el(
      "p.note",
      `Moments from half of the sequences, ρ measured in the other ${predicted.sequences || "half"}. `,
      "“Counting alone” is the distance that so few sequences give a perfect prediction.",
    ),
  ];
}
