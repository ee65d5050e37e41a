/* Elements, numbers, colours. Text from files reaches the document through here, as text. */

const DATA = JSON.parse(document.getElementById("data").textContent);
const ROOT = document.documentElement;

/** "div.a.b" with children, strings as text; first, if an object, attributes and handlers ("on" + event). */
function el(kind, ...rest) {
  const [tag, ...classes] = kind.split(".");
  const made = document.createElement(tag);
  made.classList.add(...classes);
  const attributes = rest[0]?.constructor === Object ? rest.shift() : {};
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value === true) made.setAttribute(key, "");
    else if (value !== false && value != null) made.setAttribute(key, value);
  }
  made.append(...rest.flat(2).filter((child) => child != null));
  return made;
}

/** Plotly reads a few tags in names and labels; this is what it shows as the text itself. */
function escaped(text) {
  const short = String(text).length > 80 ? String(text).slice(0, 79) + "…" : String(text);
  return short.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
}

/** Four significant digits, for people. */
function shown(value, digits = 4) {
  if (value == null || Number.isNaN(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  const text =
    size >= 1e6 || size < 1e-4
      ? value.toExponential(Math.max(0, digits - 2))
      : Number.isInteger(value)
        ? value.toLocaleString("en-US")
        : value.toPrecision(digits).includes("e")
          ? Math.round(value).toLocaleString("en-US")
          : value.toPrecision(digits);
  return text.replace("-", "−");
}

const kept = new Map();

/** A packed array as {shape, values}; NaN where a number is missing. */
function opened(packed) {
  if (kept.has(packed)) return kept.get(packed);
  const text = packed.i2 ?? packed.f4;
  const bytes = Uint8Array.fromBase64?.(text) ?? Uint8Array.from(atob(text), (each) => each.charCodeAt(0));
  let values;
  if (packed.f4 !== undefined) values = new Float32Array(bytes.buffer);
  else values = Float32Array.from(new Int16Array(bytes.buffer), (q) => (q === -32768 ? NaN : q * packed.step));
  const made = { shape: packed.shape, values };
  kept.set(packed, made);
  return made;
}

/** The part of a packed array at these first indices, flat. */
function part(packed, ...places) {
  const { shape, values } = opened(packed);
  let size = values.length;
  let start = 0;
  places.forEach((place, axis) => {
    size /= shape[axis];
    start += place * size;
  });
  return values.subarray(start, start + size);
}

/** A flat array as rows of so many; NaN as null, which plotly leaves blank. */
function rowsOf(values, width) {
  const rows = [];
  for (let start = 0; start < values.length; start += width)
    rows.push(Array.from(values.subarray(start, start + width), (v) => (Number.isNaN(v) ? null : v)));
  return rows;
}

function transposed(rows) {
  return rows[0].map((_, column) => rows.map((row) => row[column]));
}

function meanOf(values) {
  const there = values.filter((value) => value != null && !Number.isNaN(value));
  return there.length ? there.reduce((a, b) => a + b, 0) / there.length : NaN;
}

/** [lowest, highest] of what is there; [Infinity, −Infinity] of nothing. */
function extent(values) {
  let [low, high] = [Infinity, -Infinity];
  for (const value of values)
    if (value != null && !Number.isNaN(value)) {
      if (value < low) low = value;
      if (value > high) high = value;
    }
  return [low, high];
}

function range(count) {
  return Array.from({ length: count }, (_, index) => index);
}

/** A labelled <select>; options are texts, their index is passed on. */
function choice(label, options, index, tell) {
  const box = el(
    "select",
    { onchange: () => tell(box.selectedIndex) },
    options.map((text) => el("option", text)),
  );
  box.selectedIndex = index;
  return el("label.choice", el("span", label), box);
}

/** W with the subscript QK, and such. */
function math(text) {
  return text.split("_QK").flatMap((piece, index) => (index ? [el("sub", "QK"), piece] : [piece]));
}

/* ---- colours that depend on the theme ---- */

const RAMPS = {
  light: { within: ["#74c7b8", "#41b6c4", "#1d91c0", "#225ea8", "#0c2c84"], beyond: ["#f98b55", "#d7301f", "#7f0000"] },
  dark: { within: ["#1f6f7d", "#2b9fb3", "#52c3d0", "#7fe0b0", "#c3ee5a"], beyond: ["#b8512f", "#f07c52", "#ffb99a"] },
};
const DEPTH = {
  light: ["#a6cf4b", "#3fb47c", "#26828e", "#3e4989", "#440154"],
  dark: ["#6a4fb3", "#4a86c4", "#35b0a0", "#8fd744", "#fde725"],
};
const APART = ["#4477aa", "#ee6677", "#228833", "#b8922e", "#3aa8c8", "#aa3377", "#888888", "#cc6633"];

/** A colour at a share of the way along a list of colours. */
function along(colours, share) {
  const place = Math.min(Math.max(share, 0), 1) * (colours.length - 1);
  const low = Math.min(Math.floor(place), colours.length - 2);
  const [a, b] = [colours[low], colours[low + 1]].map((hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16)));
  const mixed = a.map((value, i) => Math.round(value + (b[i] - value) * (place - low)));
  return `rgb(${mixed.join(",")})`;
}

/** By depth in the model, of `index` among `count`. */
function depthColour(index, count) {
  return along(DEPTH[theme().name], count > 1 ? index / (count - 1) : 0.5);
}
