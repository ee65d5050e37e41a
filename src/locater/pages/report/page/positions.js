/* What a head, and a layer, does from position to position. */

/** Means over the heads of each module, by position; null where a module has none. */
function layerMeans({ modules }) {
  return modules.map((module) => module && transposed(rowsOf(opened(module).values, module.shape[1])).map(meanOf));
}

/** The numbers of one head, or nothing. */
function ofHead(section, packed, row) {
  const module = packed?.modules[section.grid.module[row]];
  return module ? Array.from(part(module, section.grid.head[row])) : [];
}

function entropyByQuery(section, chosen) {
  const { positions } = section.entropy;
  const count = section.modules.length;
  const means = layerMeans(section.entropy);
  // a first query that sees one key has no entropy
  const causal = means.every((mean) => !mean || !(mean[0] > 0.3 * Math.log(positions.length)));
  const bound = causal ? "ln(position)" : "ln(length)";
  const name = (index) => `layer ${section.modules[index].label}, mean`;
  const figure = new Figure("entropy by query position", 320, () => {
    const t = theme();
    const line = (y, label, look) => ({
      type: "scatter",
      mode: "lines",
      x: positions,
      y,
      name: escaped(label),
      line: look,
      hovertemplate: "<b>%{fullData.name}</b><br>query %{x}<br>%{y:.3f} nats<extra></extra>",
    });
    const data = range(count)
      .filter((index) => means[index])
      .map((index) => ({
        ...line(means[index], name(index), { color: depthColour(index, count), width: 1.1 }),
        opacity: 0.8,
      }));
    const most = positions.map((place) => Math.log(causal ? place : positions.at(-1)));
    data.push(line(most, bound, { color: t.muted, width: 1.2, dash: "4px,3px" }));
    data.push(
      line(ofHead(section, section.entropy, chosen.row), headName(section, chosen.row), { color: t.alarm, width: 2.4 }),
    );
    const from = { rangemode: "tozero" };
    return { data, layout: { xaxis: axis("query position", from), yaxis: axis("entropy, nats", from) } };
  });
  chosen.following.push(figure);
  const ends = [...new Set([0, count - 1])];
  const key = legend(
    ...ends.map((index) => [swatch("member", () => depthColour(index, count)), name(index)]),
    [swatch("muted dashed"), bound],
    [swatch("alarm thick"), chosen.name()],
  );
  return captioned(["entropy by query, a line a layer"], figure, key);
}

function rhoByKey(section, chosen) {
  const { predicted } = section;
  const figure = new Figure("ρ by key position", 320, () => {
    const data = predicted ? lawTraces(section, chosen.row) : [measuredTrace(section, chosen.row)];
    for (const trace of data)
      trace.hovertemplate = "<b>%{fullData.name}</b><br>key %{x}<br>ρ = %{y:.3f}<extra></extra>";
    const y = axis("ρ", { range: [-0.02, 1.02] });
    return { data, layout: { xaxis: axis("key position", { rangemode: "tozero" }), yaxis: y } };
  });
  chosen.following.push(figure);
  const key = predicted
    ? legend([swatch("alarm point"), "measured, held out"], ...lawKeys(predicted))
    : legend([swatch("alarm"), "measured"]);
  const of = predicted ? "the last token of a sequence" : "the last token of the text in a sequence";
  return captioned([`ρ by key, for ${of}`], figure, key);
}

function measuredTrace(section, row) {
  return {
    type: "scatter",
    mode: "lines+markers",
    x: section.rho.positions,
    y: ofHead(section, section.rho, row),
    name: "measured",
    line: { color: theme().alarm, width: 1 },
    marker: { size: 4 },
  };
}

function rhoByLayer(section) {
  const count = section.modules.length;
  const rows = layerMeans(section.rho).map((mean) => mean ?? []);
  const figure = new Figure("ρ by key and layer", Math.min(420, 150 + 6 * count), () => ({
    data: [
      {
        type: "heatmap",
        x: section.rho.positions,
        y: range(count),
        z: rows,
        zmin: 0,
        zmax: 1,
        colorscale: "Cividis",
        colorbar: colourBar("ρ"),
        hovertemplate: "key %{x}<br>ρ = %{z:.3f}<extra></extra>",
      },
    ],
    layout: {
      xaxis: axis("key position", { showgrid: false }),
      yaxis: layerAxis(count, { showgrid: false, autorange: "reversed", showline: false }),
      margin: { r: BESIDE_BAR },
    },
  }));
  return captioned(["ρ by key and layer, mean over heads"], figure);
}

function rhoNote() {
  return el(
    "p.note",
    "ρ: share of sequences in which a key is on the slope of the paper's piecewise linear softmax; softmax itself can ",
    "look elsewhere.",
  );
}
