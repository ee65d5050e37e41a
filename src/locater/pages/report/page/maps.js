/* Heads: which one is chosen, layer × head maps and tables in which to choose it. */

function headName(section, row) {
  return `layer ${section.modules[section.grid.module[row]].label}, head ${section.grid.head[row]}`;
}

/** The chosen head, as a row of the section's heads, and all that follows it. */
class Chosen {
  /** Begins with the head of the largest value, or of the smallest where `sign` is −1. */
  constructor(section, values, sign) {
    this.section = section;
    const size = (row) => (values[row] == null ? -Infinity : sign * values[row]);
    this.row = range(values.length).reduce((best, row) => (size(row) > size(best) ? row : best), 0);
    this.following = []; // whatever has refresh()
    const { module, head } = section.grid;
    this.rows = new Map(module.map((each, row) => [`${each} ${head[row]}`, row]));
  }

  choose(row) {
    this.row = row;
    for (const each of this.following) each.refresh();
  }

  /** Of a module and a head, if there is such a head. */
  at(module, head) {
    return this.rows.get(`${module} ${head}`);
  }

  /** Text that is always of the chosen head. */
  follow(made, write) {
    const refresh = () => made.replaceChildren(...write());
    this.following.push({ refresh });
    refresh();
    return made;
  }

  name() {
    return this.follow(el("b"), () => [headName(this.section, this.row)]);
  }

  title() {
    const { modules, grid } = this.section;
    return this.follow(el("h4"), () => [
      headName(this.section, this.row),
      el("span.path", modules[grid.module[this.row]].name),
    ]);
  }

  /** Selects for a module and a head. */
  selects() {
    const { modules, grid } = this.section;
    const go = () =>
      this.choose(this.at(layer.selectedIndex, Number(head.value)) ?? grid.module.indexOf(layer.selectedIndex));
    const layer = el(
      "select",
      { onchange: go },
      modules.map((module) => el("option", module.label)),
    );
    const head = el("select", { onchange: go });
    const refresh = () => {
      const module = grid.module[this.row];
      layer.selectedIndex = module;
      const heads = grid.head.filter((_, row) => grid.module[row] === module);
      head.replaceChildren(...heads.map((each) => el("option", { value: each }, String(each))));
      head.value = grid.head[this.row];
    };
    this.following.push({ refresh });
    refresh();
    const labelled = (name, box) => el("label.choice", el("span", name), box);
    return el("div.controls", labelled("layer", layer), labelled("head", head));
  }
}

/** All heads as a table; columns are [key, label]. */
function headTable(section, columns, chosen, sortBy, more = []) {
  const { grid, modules } = section;
  const table = sortable(
    [
      { name: "layer", values: grid.module.map((module) => modules[module].label), words: true },
      { name: "head", values: grid.head },
      ...columns.map(([name, label]) => ({ name: label, values: section.columns[name] })),
      ...more,
    ],
    { pick: (row) => chosen.choose(row), label: "all heads", sortBy },
  );
  chosen.following.push({ refresh: () => table.select(chosen.row) });
  table.select(chosen.row);
  return table;
}

/** The values of a map by module and head, and what a label says of each. */
function cellsOf(section, values, look) {
  const heads = extent(section.grid.head)[1] + 1;
  const blank = (value) => section.modules.map(() => new Array(heads).fill(value));
  const [cells, texts] = [blank(null), blank("")];
  values.forEach((value, row) => {
    const [module, head] = [section.grid.module[row], section.grid.head[row]];
    if (value != null) cells[module][head] = look !== "log" ? value : value > 0 ? Math.log10(value) : null;
    texts[module][head] = `<b>${escaped(headName(section, row))}</b><br>${shown(value)}`;
  });
  return [cells, texts];
}

/** A figure of one value a head, in which a click chooses. look: plain, log (of base 10) or centred (about 0). */
function headMap(section, label, values, look, chosen) {
  const [cells, texts] = cellsOf(section, values, look);
  const [modules, heads] = [cells.length, cells[0].length];
  const reach = extent(cells.flat().map(Math.abs))[1] || 1;
  const names = section.modules.map((module) =>
    module.label.length > 18 ? `…${module.label.slice(-17)}` : module.label,
  );
  const ticks = range(modules).filter((module) => module % Math.ceil(modules / 12) === 0);
  const gap = heads > 24 || modules > 24 ? 0 : 1;
  const numbers = names.every((name) => /^\d+$/.test(name));

  const marks = () => {
    const [module, head] = [section.grid.module[chosen.row], section.grid.head[chosen.row]];
    const box = { type: "rect", x0: head - 0.5, x1: head + 0.5, y0: module - 0.5, y1: module + 0.5 };
    const around = (color, width) => ({ ...box, line: { color, width } });
    return [around(theme().surface, 4), around(theme().alarm, 2)];
  };
  const make = () => ({
    data: [
      {
        type: "heatmap",
        z: cells,
        text: texts,
        hovertemplate: "%{text}<extra></extra>",
        colorscale: look === "centred" ? diverging() : "Cividis",
        ...(look === "centred" ? { zmin: -reach, zmax: reach } : {}),
        colorbar: { ...colourBar(""), ...(look === "log" ? logTicks(cells.flat()) : {}) },
        xgap: gap,
        ygap: gap,
      },
    ],
    layout: {
      xaxis: axis("head", { ...BARE, dtick: Math.max(1, Math.ceil(heads / 8)), range: [-0.5, heads - 0.5] }),
      yaxis: axis(numbers ? "layer" : "", {
        ...BARE,
        range: [modules - 0.5, -0.5],
        tickvals: ticks,
        ticktext: ticks.map((module) => escaped(names[module])),
      }),
      shapes: marks(),
      margin: { l: 30 + 6.5 * extent(names.map((name) => name.length))[1], r: 68 },
    },
  });
  const click = (point) => {
    const row = chosen.at(Math.round(point.y), Math.round(point.x));
    if (row !== undefined) chosen.choose(row);
  };
  const figure = new Figure(label, Math.min(420, 150 + 6 * modules), make, click);
  chosen.following.push({ refresh: () => figure.mark(marks()) });
  return figure;
}

/** Ticks of a colour bar whose values are logarithms: at 1, 2 and 5, or at powers of ten where those are many, or at
 *  some of these where they are; at the ends and the middle where they are too few. */
function logTicks(logs) {
  const [low, high] = extent(logs);
  if (!(low <= high)) return {};
  const steps = high - low > 2.5 ? [1] : high - low > 1.2 ? [1, 3] : [1, 2, 5];
  const every = Math.ceil((high - low) / 8) || 1;
  const powers = range(Math.floor(high) - Math.floor(low) + 1).map((k) => k + Math.floor(low));
  const values = powers
    .filter((power) => power % every === 0)
    .flatMap((power) => steps.map((step) => step * 10 ** power))
    .filter((value) => Math.log10(value) >= low && Math.log10(value) <= high);
  const raised = (value) => `10<sup>${Math.round(Math.log10(value))}</sup>`.replace("-", "−");
  const short = (value) => every === 1 && value >= 1e-4 && value < 1e6;
  const text = (value) => (steps.length > 1 || short(value) ? shown(value, 1) : raised(value));
  if (values.length > 1) return { tickvals: values.map(Math.log10), ticktext: values.map(text) };
  const few = [low, (low + high) / 2, high];
  return { tickvals: few, ticktext: few.map((log) => shown(10 ** log, 3)) };
}

/** Blue through the surface to red: zero recedes into the page. */
function diverging() {
  const colours =
    theme().name === "dark"
      ? ["#8ec8ff", "#3a7fc0", "#20262c", "#c4553f", "#ffb39c"]
      : ["#053061", "#4393c3", "#f7f7f7", "#d6604d", "#67001f"];
  return colours.map((colour, index) => [index / 4, colour]);
}

/* ---- eigenvalues in the complex plane ---- */

/** Real and imaginary parts in turn as pairs, without what is missing. */
function complex(flat) {
  const pairs = range(flat.length / 2).map((k) => [flat[2 * k], flat[2 * k + 1]]);
  return pairs.filter(([re]) => !Number.isNaN(re));
}

function points(pairs, color, size) {
  return {
    type: "scatter",
    mode: "markers",
    x: pairs.map(([re]) => re),
    y: pairs.map(([, im]) => im),
    marker: { color, size, opacity: 0.7 },
    hovertemplate: "%{x:.4g} + %{y:.4g} i<extra></extra>",
  };
}

/** The two axes of the complex plane. */
function crossHair() {
  const lines = [
    { x0: 0, x1: 0, y0: 0, y1: 1, yref: "paper" },
    { x0: 0, x1: 1, y0: 0, y1: 0, xref: "paper" },
  ];
  return lines.map((line) => ({ type: "line", line: { color: theme().line, width: 1 }, layer: "below", ...line }));
}
