/* A log of attention in training: modules over steps, the heads of one, alarms. */

/** A number a module and step: its heads' numbers, reduced. */
function ofModules(section, name, reduce) {
  return range(section.modules.length).map((module) => {
    const rows = rowsOf(part(section.heads[name], module), section.steps.length); // heads × steps
    return transposed(rows).map((values) => {
      const there = values.filter((value) => value != null);
      return there.length ? reduce(there) : null;
    });
  });
}

function logCurves(section) {
  const residuals = rowsOf(opened(section.rank_residual).values, section.steps.length);
  return [
    ["lowest entropy share of a module's heads", "share", ofModules(section, "entropy_share", (all) => extent(all)[0])],
    ["mean entropy share", "share", ofModules(section, "entropy_share", meanOf)],
    ["largest logit", "logit", ofModules(section, "max_logit", (all) => extent(all)[1])],
    ["rank residual of the tokens that enter", "residual", residuals],
  ];
}

function logFigure(section, [title, unit, lines], on, alarmSteps) {
  const { modules, steps } = section;
  const [low, high] = extent(lines.flat());
  const wide = unit === "logit" && low > 0 && high > 100 * low;
  return new Figure(`${title}, over training`, 270, () => {
    const line = { type: "line", yref: "paper", y0: 0, y1: 1, layer: "below" };
    const look = { color: theme().alarm, width: 1, dash: "2px,3px" };
    return {
      data: lines.map((y, module) => ({
        type: "scatter",
        mode: steps.length > 1 ? "lines" : "markers",
        x: steps,
        y,
        visible: on.has(module),
        name: escaped(modules[module].name),
        line: { color: depthColour(module, modules.length), width: 1.5 },
        hovertemplate: "<b>%{fullData.name}</b><br>step %{x:,}<br>%{y:.4g}<extra></extra>",
      })),
      layout: {
        xaxis: axis("step"),
        yaxis: axis(unit, wide ? { type: "log", dtick: 1 } : { rangemode: "tozero" }),
        shapes: alarmSteps.slice(0, 50).map((step) => ({ ...line, x0: step, x1: step, line: look })),
      },
    };
  });
}

function moduleSwitches({ modules }, on, tell) {
  const every = range(modules.length);
  const set = (chosen, value) => {
    for (const index of chosen) value ? on.add(index) : on.delete(index);
    show();
    tell();
  };
  const buttons = every.map((index) => {
    const about = { type: "button", title: modules[index].name, onclick: () => set([index], !on.has(index)) };
    return el(
      "button.strength",
      about,
      swatch("member", () => depthColour(index, modules.length)),
      /^\d+$/.test(modules[index].label) ? `layer ${modules[index].label}` : modules[index].label,
    );
  });
  const show = () => buttons.forEach((made, index) => made.setAttribute("aria-pressed", String(on.has(index))));
  const all = [true, false].map((value) =>
    el("button.plain", { type: "button", onclick: () => set(every, value) }, value ? "all" : "none"),
  );
  show();
  return el("div.switches", { role: "group", "aria-label": "modules to show" }, buttons, all);
}

function headsPart(section) {
  const { modules, steps } = section;
  const heads = opened(section.heads.entropy_share).shape[1];
  const quantities = [
    ["entropy_share", "entropy share"],
    ["max_logit", "largest logit"],
  ];
  const state = { module: 0, quantity: 0 };
  const map = new Figure("heads of one module over training", Math.min(420, 150 + 14 * heads), () => ({
    data: [
      {
        type: "heatmap",
        x: steps,
        y: range(heads),
        z: rowsOf(part(section.heads[quantities[state.quantity][0]], state.module), steps.length),
        colorscale: "Cividis",
        colorbar: colourBar(""),
        hovertemplate: "step %{x:,}<br>head %{y}<br>%{z:.4g}<extra></extra>",
      },
    ],
    layout: {
      xaxis: axis("step", { showgrid: false }),
      yaxis: axis("head", { ...BARE, autorange: "reversed", dtick: Math.max(1, Math.ceil(heads / 8)) }),
      margin: { r: BESIDE_BAR },
    },
  }));
  const about = el("span");
  const set = (name) => (index) => {
    state[name] = index;
    about.replaceChildren(el("b", modules[state.module].name), `, ${quantities[state.quantity][1]}`);
    map.refresh();
  };
  set("module")(0);
  const labels = modules.map((module) => module.label);
  const shows = quantities.map(([, label]) => label);
  return [
    el("h3", "The heads of one module"),
    el("div.controls", choice("module", labels, 0, set("module")), choice("show", shows, 0, set("quantity"))),
    captioned([about], map),
  ];
}

function logSection(section) {
  const on = new Set(range(section.modules.length));
  const steps = [...new Set((section.alarms ?? []).map((alarm) => alarm.step))].filter(Number.isFinite);
  const curves = logCurves(section);
  const figures = curves.map((curve) => logFigure(section, curve, on, steps));
  const again = () => figures.forEach((figure) => figure.refresh());
  return [
    alarmsPart(section.alarms, "None in these steps."),
    el("h3", "Over training"),
    moduleSwitches(section, on, again),
    el(
      "div.pair",
      curves.map(([title], index) => captioned([title], figures[index])),
    ),
    steps.length ? el("p.note", "Dotted lines are the steps of alarms.") : [],
    headsPart(section),
  ].flat();
}
