/* Softmax attention measured against what three laws predict: entropy of every head, weights of one. */

const SOFTMAX_LAWS = { general: "general law", separable: "K ⊗ Σ", "three-number": "three numbers" };
const SOFTMAX_SWATCHES = { general: "first", separable: "second dashed", "three-number": "third dotted" };

function softmaxLook(law) {
  const t = theme();
  return {
    general: { color: t.first, dash: "solid", symbol: "circle" },
    separable: { color: t.second, dash: "5px,3px", symbol: "diamond-open" },
    "three-number": { color: t.third, dash: "2px,2px", symbol: "x-thin-open" },
  }[law];
}

/** Of every head, by row of the section: null where a law has none. */
function softmaxEntropies(section, name) {
  const { module, head } = section.grid;
  return module.map((each, row) => section.softmax.modules[each]?.entropy[name]?.[head[row]] ?? null);
}

/** All heads, a mark a law; the chosen one ringed. A click chooses. */
function entropyAgreement(section, chosen) {
  const { laws } = section.softmax;
  const measured = softmaxEntropies(section, "measured");
  const predicted = new Map(laws.map((law) => [law, softmaxEntropies(section, law)]));
  const highest = 1.04 * extent([measured, ...predicted.values()].flat())[1] || 1;
  const make = () => {
    const t = theme();
    const names = measured.map((_, row) => escaped(headName(section, row)));
    const marks = [...laws].reverse().map((law) => ({
      type: "scatter",
      mode: "markers",
      x: measured,
      y: predicted.get(law),
      name: SOFTMAX_LAWS[law],
      text: names,
      marker: {
        color: softmaxLook(law).color,
        symbol: softmaxLook(law).symbol,
        size: 6,
        opacity: law === "general" ? 0.9 : 0.6,
        line: { color: softmaxLook(law).color, width: law === "general" ? 0 : 1.2 },
      },
      hovertemplate: "<b>%{text}</b><br>measured %{x:.3f} nats<br>%{fullData.name} %{y:.3f} nats<extra></extra>",
    }));
    const ring = {
      type: "scatter",
      mode: "markers",
      x: laws.map(() => measured[chosen.row]),
      y: laws.map((law) => predicted.get(law)[chosen.row]),
      name: names[chosen.row],
      hoverinfo: "skip",
      marker: { color: t.alarm, symbol: "circle-open", size: 12, line: { width: 2 } },
    };
    const ends = { x0: 0, y0: 0, x1: highest, y1: highest };
    const diagonal = { type: "line", ...ends, line: { color: t.muted, width: 1 }, layer: "below" };
    const square = { range: [0, highest], constrain: "domain" };
    return {
      data: [...marks, ring],
      layout: {
        shapes: [diagonal],
        xaxis: axis("measured entropy, nats", square),
        yaxis: axis("predicted entropy, nats", { ...square, scaleanchor: "x" }),
      },
    };
  };
  const figure = new Figure("predicted against measured entropy", 400, make, (point) => {
    if (point.data.text) chosen.choose(point.pointNumber);
  });
  chosen.following.push(figure);
  return figure;
}

function measuredPoints(x, y) {
  const marker = { color: theme().alarm, size: 5, opacity: 0.8 };
  return { type: "scatter", mode: "markers", x, y, name: "measured, held out", marker };
}

/** One head: measured weights as points, each law as a line. */
function weightsByKey(section, chosen) {
  const { positions, laws, modules } = section.softmax;
  const figure = new Figure("weights by key", 400, () => {
    const own = modules[section.grid.module[chosen.row]];
    const of = (name) => (own?.weights[name] ? Array.from(part(own.weights[name], section.grid.head[chosen.row])) : []);
    const measured = measuredPoints(positions, of("measured"));
    const lines = laws.map((law) => ({
      type: "scatter",
      mode: "lines",
      x: positions,
      y: of(law),
      name: SOFTMAX_LAWS[law],
      line: { color: softmaxLook(law).color, dash: softmaxLook(law).dash, width: 2 },
    }));
    const data = [...lines, measured];
    for (const trace of data)
      trace.hovertemplate = "<b>%{fullData.name}</b><br>key %{x}<br>weight %{y:.4f}<extra></extra>";
    const least = 1e-5; // below it nothing is looked at
    const [, most] = extent(data.flatMap((trace) => trace.y));
    const range = [Math.log10(least), Math.log10(Math.max(most, 10 * least)) + 0.1];
    const y = axis("mean weight", { type: "log", range, dtick: 1, exponentformat: "power" });
    return { data, layout: { xaxis: axis("key position", { rangemode: "tozero" }), yaxis: y } };
  });
  chosen.following.push(figure);
  return figure;
}

function agreementTable({ agreement }) {
  const column = (label, name) => ({ name: label, values: agreement.map((row) => row[name]), digits: 3 });
  const laws = { name: "law", values: agreement.map((row) => SOFTMAX_LAWS[row.law]), words: true };
  return sortable(
    [
      laws,
      column("median error, nats", "median"),
      column("90th percentile", "percentile_90"),
      column("rank correlation", "rank_correlation"),
      column("median error of a perfect law", "floor"),
    ],
    { label: "predicted entropy over all heads", all: true },
  );
}

function softmaxPart(section, chosen) {
  const { softmax } = section;
  const keys = (look) => softmax.laws.map((law) => [swatch(look(SOFTMAX_SWATCHES[law])), SOFTMAX_LAWS[law]]);
  const points = keys((look) => `${look.split(" ")[0]} point`);
  return [
    el("h3", "Softmax attention measured against predicted"),
    el(
      "div.pair",
      captioned(
        [`entropy of every head, for token ${softmax.query}`],
        entropyAgreement(section, chosen),
        legend(...points, [swatch("alarm point"), chosen.name()]),
      ),
      captioned(
        ["mean weight by key"],
        weightsByKey(section, chosen),
        legend([swatch("alarm point"), "measured, held out"], ...keys((look) => look)),
      ),
    ),
    softmax.agreement.length ? agreementTable(softmax) : null,
    el(
      "p.note",
      "Laws are estimated from half of the sequences, entropy and weights measured in the other half. The general ",
      "law: Gaussian queries and keys as the head compares them, by position. K ⊗ Σ: Gaussian tokens at the module's ",
      "input without means, RoPE or biases; three numbers: of these trace, trace of the square and scale alone.",
    ),
  ].filter((each) => each);
}
