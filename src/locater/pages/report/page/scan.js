/* A scan: six maps, a head's eigenvalues, a table. */

const SCAN_MAPS = [
  ["r", "r = tr W_QK · scale of the logits", "centred"],
  ["eta", "η = √tr(WᵀW) · scale of the logits", "log"],
  ["xi", "ξ = tr W / √tr(WᵀW)", "centred"],
  ["effective_rank", "effective rank", "plain"],
  ["symmetric_share", "symmetric share of ‖W‖²", "plain"],
  ["spectral_norm", "‖W_QK‖₂", "log"],
];
const SCAN_COLUMNS = [
  ["trace", "tr W_QK"],
  ["scale", "scale"],
  ["xi", "ξ"],
  ["eta", "η"],
  ["r", "r"],
  ["spectral_norm", "‖W‖₂"],
  ["effective_rank", "effective rank"],
  ["symmetric_share", "symmetric share"],
  ["attention_entropy", "softmax entropy"],
];

function cloudFigure(section, chosen) {
  const figure = new Figure("eigenvalues of the chosen head in the complex plane", 340, () => {
    const packed = section.eigenvalues?.[section.grid.module[chosen.row]];
    const head = section.grid.head[chosen.row];
    const cloud = packed && head < packed.shape[0] ? complex(part(packed, head)) : [];
    const t = theme();
    const mean = {
      type: "scatter",
      mode: "markers",
      x: [meanOf(cloud.map(([re]) => re))],
      y: [0],
      marker: { symbol: "line-ns", size: 26, line: { color: t.second, width: 2.5 } },
      hovertemplate: "mean %{x:.4g}<extra></extra>",
    };
    return {
      data: [points(cloud, t.first, 7), mean],
      layout: {
        uirevision: String(chosen.row),
        xaxis: axis("Re w"),
        yaxis: axis("Im w", { scaleanchor: "x" }),
        shapes: crossHair(),
        annotations: cloud.length ? [] : [remark("no eigenvalues in this file")],
      },
    };
  });
  chosen.following.push(figure);
  return captioned(["eigenvalues of ", ...math("W_QK"), ", their mean as a bar"], figure);
}

/** Two words for a head, by what they speak of. */
const SCAN_WORDS = Object.entries({ attention_regime: "softmax", regime: "shape of ρ" });

function word(column, row) {
  return column.names[column.rows[row]] ?? "";
}

/** What the table says of the chosen head. */
function headFacts(section, shownColumns, chosen) {
  const box = el("dl.facts");
  const refresh = () => {
    const facts = shownColumns.map(([name, label]) => [label, shown(section.columns[name][chosen.row])]);
    const words = SCAN_WORDS.map(([name, label]) => [label, word(section[name], chosen.row)]);
    facts.push(...words.filter(([, value]) => value));
    box.replaceChildren(...facts.map(([label, value]) => el("div", el("dt", math(label)), el("dd", value))));
  };
  chosen.following.push({ refresh });
  refresh();
  return box;
}

function scanSection(section) {
  const { columns } = section;
  const there = SCAN_MAPS.filter(([name]) => columns[name]);
  const shownColumns = SCAN_COLUMNS.filter(([name]) => columns[name]?.some((value) => value != null));
  const chosen = new Chosen(section, columns.spectral_norm ?? columns.scale, 1);
  const maps = there.map(([name, title, look]) =>
    captioned(math(title), headMap(section, title, columns[name], look, chosen)),
  );
  const words = SCAN_WORDS.filter(([name]) => section[name].names.length).map(([name, label]) => ({
    name: label,
    values: section[name].rows.map((_, row) => word(section[name], row)),
    words: true,
  }));
  const sorted = shownColumns.findIndex(([name]) => name === "spectral_norm");
  return [
    el("h3", "Layer × head"),
    el("p.note.hint", "Click a head, here or in the table, to see its eigenvalues."),
    el("div.triple", maps),
    el("h3", "One head"),
    chosen.selects(),
    el(
      "div.pair.head",
      cloudFigure(section, chosen),
      el("div.detail", chosen.title(), headFacts(section, shownColumns, chosen)),
    ),
    el("h3", "All heads"),
    el(
      "p.note",
      `Softmax: where attention looks for ${section.tokens} independent tokens of variance 1, predicted from trace and `,
      "scale, with its entropy in nats. Shape of ρ: where, in a random walk of as many, tokens are likely on the slope of the ",
      "paper's piecewise linear softmax.",
    ),
    headTable(section, shownColumns, chosen, { column: 2 + Math.max(sorted, 0), down: true }, words),
  ];
}
