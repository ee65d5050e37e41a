/* Plotly: unpacked once, figures drawn nearest first, redrawn when theme, width or state change. */

const figures = [];
let Plotly = null;
let themeName = null; // what a reader chose; null follows the system
let printing = false;

const systemDark = matchMedia("(prefers-color-scheme: dark)");
const coarse = matchMedia("(pointer: coarse)").matches;

function theme() {
  const name = printing ? "light" : (themeName ?? (systemDark.matches ? "dark" : "light"));
  const dark = name === "dark";
  return {
    name,
    text: dark ? "#e6e8eb" : "#1b1f24",
    muted: dark ? "#9aa4af" : "#5c6670",
    grid: dark ? "#2b323a" : "#e6e9ed",
    line: dark ? "#4a545f" : "#b8c0c8",
    surface: dark ? "#171c21" : "#ffffff",
    first: dark ? "#6db3f2" : "#1f6fb4",
    second: dark ? "#ffb169" : "#c75a00",
    third: dark ? "#b7a6f5" : "#6a4fb3",
    alarm: dark ? "#ff7b72" : "#c0362c",
  };
}

function showTheme() {
  ROOT.dataset.theme = theme().name;
  for (const figure of figures) figure.refresh();
  document.dispatchEvent(new Event("themed"));
}

/** An axis in the house style. */
function axis(title, more = {}) {
  const t = theme();
  return {
    title: { text: title, standoff: 8, font: { size: 12, color: t.muted } },
    gridcolor: t.grid,
    zeroline: false,
    linecolor: t.line,
    showline: true,
    ticks: "outside",
    ticklen: 4,
    tickcolor: t.line,
    tickfont: { size: 11 },
    automargin: false, // to find margins plotly would draw twice; they are given
    ticklabeloverflow: "allow", // and to find labels that do not fit, measure each
    ...more,
  };
}

/** An axis of layers counted from 0: no ticks between them. */
function layerAxis(count, more = {}) {
  return axis("layer", { tick0: 0, dtick: Math.max(1, Math.ceil(count / 12)), ...more });
}

const BARE = { showgrid: false, showline: false }; // an axis of a map
const MARGIN = { l: 56, r: 12, t: 8, b: 42, autoexpand: false };
const BESIDE_BAR = 62; // a colour bar, its numbers and its title

function layoutOf({ margin, ...more }) {
  const t = theme();
  return {
    margin: { ...MARGIN, ...margin },
    autosize: true,
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif", size: 12, color: t.text },
    hoverlabel: { bgcolor: t.surface, bordercolor: t.line, font: { color: t.text, size: 12 }, align: "left" },
    showlegend: false,
    hovermode: "closest",
    dragmode: coarse ? false : "zoom",
    uirevision: "kept",
    ...more,
  };
}

function colourBar(title) {
  const t = theme();
  return {
    thickness: 10,
    outlinewidth: 0,
    xpad: 4,
    ticklabeloverflow: "allow",
    tickfont: { size: 10, color: t.muted },
    title: { text: title, side: "right", font: { size: 11, color: t.muted } },
  };
}

const CONFIG = {
  responsive: false, // figures are resized here, all together
  displaylogo: false,
  showSendToCloud: false, // a page sends nothing anywhere
  displayModeBar: coarse ? false : "hover",
  modeBarButtonsToRemove: ["select2d", "lasso2d", "zoomIn2d", "zoomOut2d"],
  toImageButtonOptions: { format: "svg", filename: "locater" },
};

/** A short line in a colour of the page ("first", "muted dashed", "alarm point" …) or in one of its own. */
function swatch(look, colour = null) {
  const [name, ...style] = look.split(" ");
  const made = el(["i.swatch", ...style].join("."), { "aria-hidden": "true" });
  const paint = () => made.style.setProperty("--swatch", colour ? colour() : `var(--${name})`);
  if (colour) document.addEventListener("themed", paint);
  paint();
  return made;
}

/** What the lines of a figure mean, above it: [swatch, label] each. Plotly's own does not fold on a narrow screen. */
function legend(...items) {
  return el(
    "p.legend",
    items.map(([mark, ...label]) => el("span", mark, ...label)),
  );
}

/** A figure: `make` gives {data, layout} for the state as it is; `click` is given the point that was clicked. */
class Figure {
  constructor(label, height, make, click = null) {
    this.make = make;
    this.click = click;
    this.waiting = true;
    this.drawn = false;
    this.box = el("div.plot", { role: "img", "aria-label": label });
    this.box.style.height = `${height}px`;
    figures.push(this);
  }

  /** One that cannot be drawn says so and does not keep the others from it. */
  draw() {
    this.waiting = false;
    try {
      const { data, layout } = this.make();
      Plotly.newPlot(this.box, data, layoutOf(layout), CONFIG);
      if (this.click) this.box.on("plotly_click", (event) => this.click(event.points[0]));
      this.drawn = true;
    } catch (error) {
      console.error(error);
      this.box.replaceChildren(el("p.warning", "This plot cannot be drawn."));
    }
  }

  /** Draws the state as it is now, if it was drawn before; what is not yet drawn will be. */
  refresh() {
    if (!this.drawn) return;
    const { data, layout } = this.make();
    Plotly.react(this.box, data, layoutOf({ ...layout, width: undefined }), CONFIG);
  }

  /** Only marks on top of what is drawn: far quicker. */
  mark(shapes) {
    if (this.drawn) Plotly.relayout(this.box, { shapes });
  }

  fit() {
    if (this.drawn && this.box.clientWidth) Plotly.relayout(this.box, { width: this.box.clientWidth, autosize: false });
  }

  distance() {
    const place = this.box.getBoundingClientRect();
    return Math.max(0, place.top - innerHeight, -place.bottom);
  }
}

/** A figure with its caption, and the key to its lines if it has one. */
function captioned(caption, figure, key = null) {
  return el("figure", el("figcaption", caption), key, figure.box);
}

/** Words in the middle of a plot that has nothing to show. */
function remark(text) {
  return { text, showarrow: false, xref: "paper", yref: "paper", x: 0.5, y: 0.5, font: { color: theme().muted } };
}

/** Draws what is nearest to the screen, gives the browser a breath, goes on. */
function drawNext() {
  const waiting = figures.filter((figure) => figure.waiting);
  const distances = new Map(waiting.map((figure) => [figure, figure.distance()]));
  waiting.sort((a, b) => distances.get(a) - distances.get(b));
  if (!waiting.length || distances.get(waiting[0]) > 0) ROOT.dataset.plots ??= "visible"; // all that is on the screen
  if (!waiting.length) {
    ROOT.dataset.plots = "drawn";
    return;
  }
  waiting[0].draw();
  setTimeout(drawNext);
}

async function startPlots() {
  try {
    await unpack("plotly");
    Plotly = window.Plotly;
    if (!Plotly) throw new Error("plotly did not start");
  } catch {
    ROOT.dataset.plots = "none";
    for (const figure of figures)
      figure.box.replaceChildren(
        el(
          "p.warning",
          "No plot: this browser cannot unpack the plotting library (it lacks DecompressionStream, " +
            "which browsers have since 2023). The tables are complete.",
        ),
      );
    return;
  }
  drawNext();
}

/* ---- width, theme, print ---- */

let resizing = 0;
addEventListener("resize", () => {
  cancelAnimationFrame(resizing);
  resizing = requestAnimationFrame(() => figures.forEach((figure) => figure.fit()));
});
systemDark.addEventListener("change", showTheme);

function forPrint(on) {
  if (printing === on) return;
  printing = on;
  ROOT.classList.toggle("printing", on);
  for (const each of document.querySelectorAll("details")) each.open ||= on;
  if (on && Plotly) for (const figure of figures) if (figure.waiting) figure.draw();
  showTheme();
  figures.forEach((figure) => figure.fit());
}
addEventListener("beforeprint", () => forPrint(true));
addEventListener("afterprint", () => forPrint(false));
matchMedia("print").addEventListener("change", (event) => forPrint(event.matches));
