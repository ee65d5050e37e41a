// What the controls say: the settings, their ranges, the paper's figures, and the address that keeps them.
// Needs theory.js.
const settings = (() => {
  // A slider has whole positions from −steps or 0 to steps; `value` is what a position stands for and `position` the
  // way back. Near zero, where ρ changes fastest, the positions of mean and std lie closer together.
  const cubic = (reach, from) => ({
    steps: [from, 200],
    value: (n) => Number((reach * (n / 200) ** 3).toPrecision(3)),
    position: (x) => 200 * Math.cbrt(x / reach),
  });
  const logarithmic = (low, high) => ({
    steps: [0, 200],
    value: (n) => Number((low * (high / low) ** (n / 200)).toPrecision(3)),
    position: (x) => (200 * Math.log(x / low)) / Math.log(high / low),
  });
  const linear = (low, high, step) => ({
    steps: [Math.round(low / step), Math.round(high / step)],
    value: (n) => Number((n * step).toPrecision(6)),
    position: (x) => x / step,
  });

  // `least` and `most` are what may be typed; sliders end earlier.
  const FIELDS = {
    mean: { ...cubic(2, -200), least: -100, most: 100 },
    std: { ...cubic(4, 0), least: 0, most: 100 },
    d: { ...linear(1, 256, 1), least: 1, most: 256, whole: true },
    T: { ...linear(2, 128, 1), least: 2, most: 128, whole: true },
    temperature: { ...logarithmic(0.01, 1000), least: 1e-4, most: 1e6 },
    decay: { ...linear(-1, 1, 0.01), least: -1, most: 1 },
    xi: { ...cubic(600, -200), least: -1e4, most: 1e4 },
    eta: { ...logarithmic(1e-3, 100), least: 1e-6, most: 1e6 },
  };
  const CHOICES = { mode: ["finite", "limit"], process: ["walk", "ar", "independent"], map: ["rho", "softmax"] };
  const DEFAULT = {
    mode: "finite", mean: 0.3, std: 0.1, d: 128, T: 40, temperature: null, process: "walk", decay: 0.9, xi: 5, eta: 0.3,
    map: "rho",
  };

  const PRESETS = [];
  const NOTES = {
    2: "One column of the figure: ρ over θ at this ξ and η, at d = 128 and T = 64. λ moves along η.",
    5: "The figure averages ten random spectra; this is one, the normal's mid-quantiles.",
  };
  for (const T of [2, 8, 64]) PRESETS.push({ figure: 1, name: `T = ${T}`, panel: "softmax", set: { T } });
  for (const xi of [-10, -5, -1, 0, 1, 5, 10]) {
    const set = { d: 128, T: 64, ...theory.spectrumAt(xi, 1, 128, Math.sqrt(128)) };
    PRESETS.push({ figure: 2, name: `ξ = ${minus(xi)}, η = 1`, panel: "rho", set });
  }
  for (const xi of [128, 512]) {
    const set = { mode: "limit", xi, eta: 0.01 };
    PRESETS.push({ figure: 3, name: `ξη = ${xi * 0.01}`, panel: "rho", set });
  }
  PRESETS.push({ figure: 4, name: "T = 64", panel: "entropy", set: { T: 64 } });
  for (const [mean, std] of [[0.05, 0.05], [0.2, 0.05], [0.4, 0.05], [0.3, 0.05], [0.3, 0.2], [0.3, 0.8]]) {
    PRESETS.push({ figure: 5, name: `mean ${mean}, std ${std}`, panel: "rho", set: { d: 128, T: 40, mean, std } });
  }

  function minus(value) {
    return String(value).replace("-", "−");
  }

  /** A number as a field takes it, or null. */
  function accepted(name, text) {
    const { least, most, whole } = FIELDS[name];
    const value = Number(text);
    if (String(text).trim() === "" || !Number.isFinite(value) || value < least || value > most) return null;
    return whole ? Math.round(value) : value;
  }

  /** The state as the part of an address after #: what matters in its mode. */
  function toHash(state) {
    const names = state.mode === "limit" ? ["mode", "xi", "eta", "T"] : ["mean", "std", "d", "T", "process"];
    if (state.mode !== "limit" && state.process === "ar") names.push("decay");
    if (state.mode !== "limit" && state.temperature !== null) names.push("temperature");
    if (state.map !== DEFAULT.map) names.push("map");
    return "#" + new URLSearchParams(names.map((name) => [name, String(state[name])]));
  }

  /** The default state changed by what the hash says, as far as it makes sense. */
  function fromHash(hash) {
    const state = { ...DEFAULT };
    for (const [name, text] of new URLSearchParams(hash.slice(1))) {
      if (Object.hasOwn(FIELDS, name)) state[name] = accepted(name, text) ?? state[name];
      if (Object.hasOwn(CHOICES, name) && CHOICES[name].includes(text)) state[name] = text;
    }
    return state;
  }

  /** What the workers take: with a temperature in place of "√d". */
  function resolved(state) {
    return { ...state, temperature: state.temperature ?? Math.sqrt(state.d) };
  }

  return { CHOICES, DEFAULT, FIELDS, NOTES, PRESETS, accepted, fromHash, minus, resolved, toHash };
})();
