// Two of these run: one for the curves, one for the plane. Needs theory.js, attention.js and plane.js.
//
// {task: "curves", id, settings} is answered once; {task: "plane", id, settings, extent} as often as there is something
// new to show, and given up as soon as another message arrives.
const SLICE = 25; // ms of work between looks at the mail
const SHOWN_EVERY = 200; // ms

let current = null;
self.onmessage = ({ data }) => {
  current = data.id;
  if (data.task === "curves") answer(data, curves);
  if (data.task === "plane") fill(data);
};

function answer({ id, settings }, work) {
  const started = performance.now();
  try {
    self.postMessage({ id, ...work(settings), elapsed: performance.now() - started });
  } catch (error) {
    self.postMessage({ id, error: error.message });
  }
}

/** ρ by every formula that applies, softmax, and what is read off them. */
function curves(settings) {
  if (settings.mode === "limit") {
    const theta = Float64Array.from({ length: 1001 }, (_, k) => k / 1000);
    const [asymptotic, printed] = ["asymptotic", "printed"].map((form) =>
      theory.rhoCurve(theta, settings.xi, settings.eta, form));
    const { xi, eta } = settings;
    const regime = theory.regime(asymptotic);
    return { theta, rho: { asymptotic, printed }, xi, eta, regime, softmax: attention.law(settings) };
  }
  const { mean, std, d, T, temperature } = settings;
  const eigenvalues = theory.normalSpectrum(mean, std, d);
  const process = theory.tokenProcess(settings.process, T, settings.decay);
  const exact = theory.exactRho(eigenvalues, process, temperature);
  const rho = { exact, gaussian: theory.gaussianRho(eigenvalues, process, temperature) };
  if (settings.process === "walk") {
    for (const form of ["asymptotic", "printed"]) rho[form] = theory.largeTRho(eigenvalues, T, temperature, form);
  }
  const { trace, square } = theory.traces(eigenvalues);
  return {
    theta: Float64Array.from({ length: T }, (_, i) => (i + 1) / T),
    rho,
    xi: trace / Math.sqrt(square),
    eta: Math.sqrt(square) / temperature,
    regime: theory.regime(exact),
    softmax: attention.law(settings),
    nu: theory.logitNorm(eigenvalues, process, temperature),
  };
}

async function fill({ id, settings, extent }) {
  const { xi, eta } = plane.axes(extent);
  const regimes = new Int8Array(xi.length * eta.length).fill(plane.UNKNOWN);
  const walk = settings.mode === "limit" || settings.process === "walk";
  const about = { id, names: plane.NAMES[settings.map], localises: walk && settings.map === "rho" };
  const show = (done) => self.postMessage({ ...about, xi, eta, regimes: plane.preview(regimes), done });
  try {
    const classify = plane.classifier(settings);
    let rested = performance.now(), shown = rested, pass = null;
    for (const step of plane.refine(regimes, (c, r) => classify(xi[c], eta[r]))) {
      const now = performance.now();
      if (pass !== null && (step !== pass || now - shown > SHOWN_EVERY)) {
        show(false);
        shown = now;
      }
      pass = step;
      if (now - rested < SLICE) continue;
      await new Promise((resolve) => setTimeout(resolve));
      if (current !== id) return;
      rested = performance.now();
    }
    show(true);
  } catch (error) {
    self.postMessage({ id, error: error.message });
  }
}
