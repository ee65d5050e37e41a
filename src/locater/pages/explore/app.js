// Joins controls, workers and pictures. `window.explorer` is there for consoles and tests.
function start() {
  const find = (id) => document.getElementById(id);
  const WORDS = {
    late: "ρ is high on the last tokens, not on the first",
    middle: "ρ is high in the middle, not at the ends",
    early: "ρ is high on the first tokens, not on the last",
    flat: "ρ is at least half its highest at both ends",
    vanishing: "ρ is below a tenth at every token",
  };
  const PROCESSES = { walk: "random walk", ar: "autoregressive", independent: "independent" };

  let state = settings.fromHash(location.hash);
  let hidden = new Set();
  let seen = null; // the last curves
  let map = null; // the last regimes
  const maps = new Map(); // finished ones
  let latency = null; // ms from the last change until it was painted

  // ------------------------------------------------------------------ workers

  const source = ["theory", "worker"].map((id) => find(id).textContent).join("\n");
  const address = URL.createObjectURL(new Blob([source], { type: "text/javascript" }));
  const [curveWorker, planeWorker] = [new Worker(address), new Worker(address)];
  const waiting = new Map();
  let lastId = 0;

  curveWorker.onmessage = ({ data }) => {
    const { resolve, reject } = waiting.get(data.id);
    waiting.delete(data.id);
    if (data.error) reject(new Error(data.error));
    else resolve(data);
  };

  /** ρ and the rest for a state, from the worker. */
  function compute(asked) {
    return new Promise((resolve, reject) => {
      const id = ++lastId;
      waiting.set(id, { resolve, reject });
      curveWorker.postMessage({ task: "curves", id, settings: settings.resolved(asked) });
    });
  }

  // ------------------------------------------------------------------ curves

  let busy = false, again = false, moved = 0; // when something was last changed
  let settled = [];

  /** Shows the newest state; states that come while the worker computes replace each other. */
  async function update() {
    again = true;
    if (busy) return;
    busy = true;
    while (again) {
      again = false;
      const from = moved;
      try {
        seen = await compute(state);
        await plots.rho(find("rho"), seen, hidden);
        describe();
        await painted();
        if (from > 0) latency = performance.now() - from;
        const shown = from > 0 ? `, shown ${latency.toFixed(0)} ms after the change.` : ".";
        status(`ρ and softmax computed in ${seen.elapsed.toFixed(1)} ms${shown}`);
        await others();
      } catch (error) {
        status(`These settings have no answer here: ${error.message}.`);
      }
    }
    busy = false;
    settled.splice(0).forEach((resolve) => resolve());
  }

  function painted() {
    return new Promise((resolve) => {
      if (document.hidden) resolve(); // nothing is painted then, nor are frames handed out
      else requestAnimationFrame(() => setTimeout(resolve));
    });
  }

  let drawn = {}; // what the other pictures show

  /** Brings the other pictures up to date, unless there is newer news to show first. */
  async function others() {
    refreshPlane();
    if (map && drawn.map === map) await plots.movePoint(find("plane"), seen);
    else if (map) await plots.plane(find("plane"), map, seen);
    drawn.map = map;
    const bound = JSON.stringify([state.T, seen.nu > 12 ? "far" : seen.nu]);
    if (drawn.entropy !== bound && !again) {
      await plots.entropy(find("entropy"), state.T, seen.nu);
      drawn.entropy = bound;
    }
    if (drawn.softmax !== state.T && !again) {
      await plots.softmax(find("softmax"), state.T);
      drawn.softmax = state.T;
    }
  }

  function status(text) {
    find("status").textContent = text;
  }

  // ------------------------------------------------------------------ the plane

  let planeKey = null, planeTimer = 0, planeId = 0, planeSettled = [];

  /** Asks for the regimes anew if they depend on what has changed; the mean, std and λ only move the point. */
  function refreshPlane() {
    const decades = Number.isFinite(Math.log10(seen.eta)) ? Math.log10(seen.eta) : 0;
    const widest = state.mode === "limit" ? Math.max(10, 1.15 * Math.abs(seen.xi)) : Math.sqrt(state.d);
    const extent = {
      widest, low: 10 ** Math.min(-3, Math.floor(decades)), high: 10 ** Math.max(2, Math.ceil(decades)),
    };
    const { mode, d, T, process, decay, map: kind } = state;
    const finite = { mode, d, T, process, ...(process === "ar" ? { decay } : {}) };
    const asked = { map: kind, ...(mode === "finite" ? finite : kind === "rho" ? { mode } : { mode, T }) };
    const key = JSON.stringify([asked, extent]);
    if (key === planeKey) return;
    planeKey = key;
    planeWorker.postMessage({ id: ++planeId }); // gives up what it is at
    clearTimeout(planeTimer);
    if (maps.has(key)) return showPlane({ ...maps.get(key), id: planeId });
    find("plane-panel").classList.add("stale");
    const message = { task: "plane", id: planeId, settings: asked, extent };
    planeTimer = setTimeout(() => planeWorker.postMessage(message), 150); // once the sliders are at rest
  }

  planeWorker.onmessage = ({ data }) => {
    if (data.id !== planeId) return;
    if (data.error) return status(`The plane has no answer here: ${data.error}.`);
    if (data.done) maps.set(planeKey, data);
    showPlane(data);
  };

  async function showPlane(data) {
    map = data;
    find("plane-panel").classList.remove("stale");
    await plots.plane(find("plane"), map, seen);
    drawn.map = map;
    listenToPlane();
    if (data.done) planeSettled.splice(0).forEach((resolve) => resolve(data));
  }

  let listening = false;
  function listenToPlane() {
    if (listening) return;
    listening = true;
    find("plane").on("plotly_click", ({ points }) => {
      const xi = points[0].x, eta = 10 ** points[0].y;
      if (state.mode === "limit") return change({ xi, eta });
      if (!theory.hasSpectrum(xi, state.d)) return;
      const { mean, std } = theory.spectrumAt(xi, eta, state.d, settings.resolved(state).temperature);
      change({ mean: Number(mean.toPrecision(4)), std: Number(std.toPrecision(4)) });
    });
  }

  // ------------------------------------------------------------------ words

  function describe() {
    describeRho();
    describeSoftmax();
    describePlane();
    const { xi, eta, nu } = seen;
    find("xi-value").textContent = number(xi);
    find("eta-value").textContent = number(eta);
    find("r-value").textContent = number(eta > 0 ? xi * eta : 0);
    find("needed").textContent = Math.ceil(xi * xi).toLocaleString("en");
    find("entropy-caption").innerHTML = state.mode === "limit"
      ? `For <i>T</i> = ${state.T} keys. No entropy exceeds ln <i>T</i>, as the printed bound does.`
      : `For <i>T</i> = ${state.T} keys. This spectrum: <i>ν</i> ≈ ${number(nu)} (root mean square of ` +
        `‖<i>ω</i> − <i>ω̄</i>‖), where entropy ≥ ${theory.entropyLowerBound(nu, state.T, "zhai").toFixed(3)} nats.`;
  }

  function number(value, digits = 4) {
    return Number.isFinite(value) ? settings.minus(Number(value.toPrecision(digits))) : "–";
  }

  function showChip(id, name, words) {
    find(id).textContent = words;
    find(id).style.background = plots.regimeColour(name);
  }

  function describeRho() {
    const { rho, regime } = seen, limit = state.mode === "limit";
    showChip("regime-chip", regime, regime);
    find("regime-words").textContent = WORDS[regime];
    const reference = limit ? rho.asymptotic : rho.exact;
    find("gap-title").textContent = limit ? "gap to corrected" : "gap to exact";
    for (const [form, cell] of Object.entries(gapCells)) {
      const missing = !(form in rho);
      cell.closest("tr").classList.toggle("missing", missing);
      if (missing) cell.textContent = limit ? "at finite size only" : "for the random walk only";
      else if (rho[form] === reference) cell.textContent = "–";
      else cell.textContent = Math.max(...reference.map((value, i) => Math.abs(value - rho[form][i]))).toFixed(4);
    }
  }

  function describeSoftmax() {
    const { regime, weights, weightsError, entropy, entropyError } = seen.softmax, T = weights.length;
    const words = SOFTMAX.words[regime];
    const width = `${number(Math.exp(entropy), 3)} of ${T} tokens (${PROCESSES[kind()]})`; // as Python's phrase has it
    showChip("softmax-chip", regime, words);
    find("softmax-words").textContent = width;
    find("rho").setAttribute("aria-label",
      `Over relative position: rho is ${seen.regime}, ${WORDS[seen.regime]}; softmax is ${words}, ${width}`);
    find("entropy-value").textContent = `${entropy.toFixed(3)} of ${Math.log(T).toFixed(3)} nats`;
    const error = (value) => (value < 1e-4 ? "below 0.0001" : value.toFixed(4));
    find("law-caption").innerHTML =
      `Softmax by ${softmaxLaw()}: the mean of ${attention.SAMPLES.toLocaleString("en")} sequences, drawn once for ` +
      `all settings. Standard error: ${error(entropyError)} nats of entropy, ` +
      `${error(Math.max(...weightsError))} of a weight at most.`;
  }

  /** How tokens hang together; the limit is the random walk's. */
  function kind() {
    return state.mode === "limit" ? "walk" : state.process;
  }

  function softmaxLaw() {
    return state.mode === "limit" ? "the three-number law, <i>d</i> → ∞" : "the exact law";
  }

  function describePlane() {
    const limit = state.mode === "limit", ofRho = state.map === "rho", subject = ofRho ? "<i>ρ</i>" : "Softmax";
    const law = ofRho ? (limit ? "Eq. (6) corrected, <i>T</i> and <i>d</i> → ∞" : "the exact law") : softmaxLaw();
    const size = limit ? (ofRho ? "" : `, <i>T</i> = ${state.T}`) : `, <i>d</i> = ${state.d}, <i>T</i> = ${state.T}`;
    const reach = state.d > 1 ? "|<i>ξ</i>| ≤ √<i>d</i>" : "a single eigenvalue has <i>ξ</i> = ±1, the edges";
    const dashed = "Dashed: |<i>ξη</i>| = 2, from where <i>ρ</i> of Eq. (6) localises. ";
    find("plane-caption").innerHTML = `${subject} by ${law}: ${PROCESSES[kind()]} tokens${size}` +
      `${limit ? "" : `; ${reach}`}. ${ofRho && kind() === "walk" ? dashed : ""}A click moves there.`;
    const items = plane.NAMES[state.map].map((name) => {
      const swatch = `<span class="swatch" style="background:${plots.regimeColour(name)}"></span>`;
      return `<li title="${WORDS[name] ?? ""}">${swatch}${SOFTMAX.words[name] ?? name}</li>`;
    });
    find("regimes").innerHTML = `<li><span>${subject} is</span></li>${items.join("")}`;
    find("plane").setAttribute("aria-label", `Regimes of ${state.map} over xi and eta, with the current point`);
  }

  const gapCells = {};
  for (const [form, { name, dash }] of Object.entries(plots.FORMS)) {
    const row = find("forms").tBodies[0].insertRow();
    const dashes = { solid: "", dot: "2 3", dashdot: "8 3 2 3", dash: "7 4" }[dash];
    const line = `<path d="M0 4H32" stroke="var(--${form})" stroke-width="2.5" stroke-dasharray="${dashes}"/>`;
    row.insertCell().innerHTML =
      `<label><input type="checkbox" checked><svg viewBox="0 0 32 8" aria-hidden="true">${line}</svg>${name}</label>`;
    gapCells[form] = row.insertCell();
    row.querySelector("input").addEventListener("change", ({ target }) => {
      hidden = new Set([...hidden].filter((other) => other !== form).concat(target.checked ? [] : [form]));
      plots.rho(find("rho"), seen, hidden);
    });
  }

  // ------------------------------------------------------------------ controls

  const fields = {};
  for (const element of document.querySelectorAll("[data-field]")) {
    const name = element.dataset.field, field = settings.FIELDS[name];
    const slider = document.createElement("input"), box = document.createElement("input");
    Object.assign(slider, { type: "range", id: name, min: field.steps[0], max: field.steps[1], step: 1 });
    Object.assign(box, { type: "number", id: `${name}-number`, min: field.least, max: field.most });
    box.step = field.whole ? 1 : "any";
    element.querySelector("label").htmlFor = name;
    box.setAttribute("aria-label", element.querySelector("label").textContent);
    element.append(box, slider);
    slider.addEventListener("input", () => change({ [name]: field.value(Number(slider.value)) }));
    box.addEventListener("change", () => {
      const value = settings.accepted(name, box.value);
      if (value === null) showControls();
      else change({ [name]: value });
    });
    fields[name] = { slider, box };
  }
  for (const name of Object.keys(settings.CHOICES)) {
    find(name).addEventListener("change", ({ target }) => change({ [name]: target.value }));
  }
  find("root-d").addEventListener("change", ({ target }) =>
    change({ temperature: target.checked ? null : settings.resolved(state).temperature }));
  find("reset").addEventListener("click", () => change(settings.DEFAULT));

  const groups = new Map();
  find("preset").append(new Option("The paper's figures …", ""));
  settings.PRESETS.forEach((preset, n) => {
    if (!groups.has(preset.figure)) {
      const group = Object.assign(document.createElement("optgroup"), { label: `Figure ${preset.figure}` });
      groups.set(preset.figure, group);
      find("preset").append(group);
    }
    groups.get(preset.figure).append(new Option(`Fig. ${preset.figure}: ${preset.name}`, n));
  });
  find("preset").addEventListener("change", ({ target }) => {
    if (target.value !== "") applyPreset(settings.PRESETS[Number(target.value)]);
  });

  function applyPreset(preset) {
    change({ ...settings.DEFAULT, map: state.map, ...preset.set });
    find("preset").value = settings.PRESETS.indexOf(preset);
    find("preset-note").textContent = settings.NOTES[preset.figure] ?? "";
    find("preset-note").hidden = !(preset.figure in settings.NOTES);
    const panel = find(`${preset.panel}-panel`);
    for (const other of document.querySelectorAll(".panel")) other.classList.toggle("pointed", other === panel);
    const { top, bottom } = panel.getBoundingClientRect();
    if (top < 0 || bottom > innerHeight) panel.scrollIntoView({ block: "nearest" });
  }

  function showControls() {
    const all = settings.resolved(state);
    for (const [name, { slider, box }] of Object.entries(fields)) {
      slider.value = settings.FIELDS[name].position(all[name]);
      box.value = Number(all[name].toPrecision(5));
      slider.setAttribute("aria-valuetext", box.value);
    }
    for (const name of Object.keys(settings.CHOICES)) {
      for (const radio of document.getElementsByName(name)) radio.checked = radio.value === state[name];
    }
    find("root-d").checked = state.temperature === null;
    for (const name of ["mode", "process"]) {
      for (const part of document.querySelectorAll(`[data-${name}]`)) part.hidden = part.dataset[name] !== state[name];
    }
  }

  let hashTimer = 0;
  function change(part) {
    moved = performance.now();
    state = { ...state, ...part };
    find("preset").value = "";
    find("preset-note").hidden = true;
    document.querySelectorAll(".pointed").forEach((panel) => panel.classList.remove("pointed"));
    showControls();
    clearTimeout(hashTimer); // browsers ration how often an address may change
    hashTimer = setTimeout(() => history.replaceState(null, "", settings.toHash(state)), 300);
    update();
  }

  addEventListener("hashchange", () => change(settings.fromHash(location.hash)));

  /** Draws everything anew in the colours and the width of now, without a pause in which a printer could look. */
  function redraw() {
    drawn = { map };
    if (!seen) return;
    plots.rho(find("rho"), seen, hidden);
    plots.entropy(find("entropy"), state.T, seen.nu);
    plots.softmax(find("softmax"), state.T);
    if (map) plots.plane(find("plane"), map, seen);
    describe();
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  let width = 0;
  new ResizeObserver(() => {
    if (find("rho").clientWidth !== width) redraw();
    width = find("rho").clientWidth;
  }).observe(find("rho"));
  for (const [event, printing] of [["beforeprint", true], ["afterprint", false]]) {
    addEventListener(event, () => {
      document.documentElement.classList.toggle("printing", printing); // light, and as wide as paper
      redraw();
    });
  }

  showControls();
  const ready = unpack("plotly").then(
    update,
    () => status("This page needs a browser of 2023 or later, one that can inflate what it carries."),
  );

  window.explorer = {
    applyPreset, change, compute,
    presets: settings.PRESETS,
    state: () => ({ ...state }),
    latency: () => latency,
    /** Resolves once the pictures are those of the newest state, the plane's refinement aside. */
    settled: async () => {
      await ready;
      if (busy) await new Promise((resolve) => settled.push(resolve));
    },
    /** Resolves with the regimes once every point of the plane is known. */
    planeSettled: () =>
      map?.done && map.id === planeId ? Promise.resolve(map) : new Promise((resolve) => planeSettled.push(resolve)),
  };
}

start();
