/* Perplexity, scale, entropy and trace over training, a line a member. */

const CURVES = [
  ["perplexity", "validation perplexity", "perplexity"],
  ["scale", "scale, tr(W_QKᵀW_QK)", "scale"],
  ["entropy", "attention entropy", "nats"],
  ["trace", "trace, tr W_QK", "trace"],
];
const WINDOWS = [
  ["all of training", 0],
  ["its second half", 0.5],
  ["its last tenth", 0.9],
];
const HIGHEST = 3; // perplexity ends at this multiple of the lowest: an untrained model's is hundreds of times as high

/** What a member recorded of a quantity: [steps, values], of the mean of all heads or of a layer's. */
function recorded(section, name, member, layer) {
  const width = opened(section.curves[name]).shape[2];
  const values = part(section.curves[name], member);
  const at = range(section.steps.length).filter((n) => Number.isFinite(values[n * width + Math.min(layer, width - 1)]));
  return [at.map((n) => section.steps[n]), at.map((n) => values[n * width + Math.min(layer, width - 1)])];
}

/** The range of an axis for values between two, and whether it is better logarithmic. */
function reachOf(name, low, high) {
  if (!Number.isFinite(low)) return [undefined, false];
  if (name === "perplexity") high = Math.min(high, HIGHEST * low);
  else if (low > 0 && high > 30 * low) return [[Math.log10(low) - 0.05, Math.log10(high) + 0.05], true];
  const room = 0.04 * (high - low) || Math.abs(high) * 0.05 || 1;
  return [[low - room, high + room], false];
}

function curveLayout(section, name, unit, values, state) {
  const last = section.steps.at(-1) || 1;
  const from = WINDOWS[state.window][1] * last;
  const [y, wide] = reachOf(name, ...extent(values));
  const x = state.log ? [Math.log10(Math.max(1, from)), Math.log10(last)] : [from, last];
  const targets = name === "trace" ? [...new Set(section.members.map((member) => member.target))] : [];
  const level = (target) => ({
    type: "line",
    xref: "paper",
    x0: 0,
    x1: 1,
    y0: target,
    y1: target,
    layer: "below",
    line: { color: theme().line, width: 1 },
  });
  return {
    uirevision: `${state.window} ${state.log} ${state.layer}`, // a zoom is kept until another view is chosen
    xaxis: axis("updates", { range: x, ...(state.log ? { type: "log", dtick: 1 } : {}) }),
    yaxis: axis(unit, { range: y, ...(wide ? { type: "log", dtick: 1 } : {}) }),
    shapes: targets.filter((target) => target != null).map(level),
  };
}

function curveFigure(section, [name, title, unit], on, state) {
  // no LocAteR last, on top: its dashes let the others through
  const order = range(section.members.length).sort(
    (a, b) => isWithout(section.members[a]) - isWithout(section.members[b]),
  );
  return new Figure(`${title} over training, a line a member`, 270, () => {
    const from = WINDOWS[state.window][1] * section.steps.at(-1);
    const within = [];
    const data = order.map((member) => {
      const [x, y] = recorded(section, name, member, state.layer);
      if (on.has(member)) within.push(...y.filter((_, n) => x[n] >= from));
      const dashed = isWithout(section.members[member]);
      return {
        type: "scatter",
        mode: x.length > 1 ? "lines" : "markers",
        x,
        y,
        name: escaped(section.members[member].label),
        visible: on.has(member),
        line: { color: memberColour(section, member), width: dashed ? 1.6 : 1.4, dash: dashed ? "4px,2px" : "solid" },
        hovertemplate: "<b>%{fullData.name}</b><br>step %{x:,}<br>%{y:.5g}<extra></extra>",
      };
    });
    return { data, layout: curveLayout(section, name, unit, within, state) };
  });
}

function curvesPart(section) {
  const on = new Set(range(section.members.length));
  const state = { window: 0, log: false, layer: 0 };
  const figures = CURVES.map((curve) => curveFigure(section, curve, on, state));
  const again = () => figures.forEach((figure) => figure.refresh());
  const set = (name) => (index) => {
    state[name] = index;
    again();
  };
  const parts = extent(CURVES.map(([name]) => opened(section.curves[name]).shape[2]))[1];
  const layers = ["mean of all", ...range(parts - 1).map((layer) => `mean of layer ${layer}`)];
  return [
    el("h3", "Over training"),
    memberSwitches(section, on, again),
    el(
      "div.controls",
      choice(
        "show",
        WINDOWS.map(([name]) => name),
        0,
        set("window"),
      ),
      choice("updates", ["linear", "logarithmic"], 0, set("log")),
      parts > 1 ? choice("heads", layers, 0, set("layer")) : null,
    ),
    el(
      "div.pair",
      CURVES.map(([, title], index) => captioned(math(title), figures[index])),
    ),
    el(
      "p.note",
      "Means over heads. Perplexity is cut at three times its lowest.",
      el("span.hint", " Drag to zoom, double-click to go back."),
    ),
  ];
}
