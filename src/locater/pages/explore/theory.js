// locater.theory for the browser: the same formulas, the same names. Letters as there: w eigenvalues of W = W_QK Σ,
// θ = i/T, ξ = tr W/√tr W², η = √tr W²/λ. Needs quadratic.js.
const theory = (() => {
  const REGIMES = ["late", "middle", "early", "flat", "vanishing"];
  const ROOT_PI = Math.sqrt(Math.PI);

  // ------------------------------------------------------------------ the normal law

  /** erf to rounding: a series of positive terms, and beyond 2.5 a continued fraction for 1 − erf. */
  function erf(x) {
    const size = Math.abs(x);
    if (size > 6) return Math.sign(x);
    if (size > 2.5) return Math.sign(x) * (1 - erfcTail(size));
    let term = x, sum = x;
    for (let n = 1; Math.abs(term) > 1e-17 * Math.abs(sum); n++) {
      term *= (2 * x * x) / (2 * n + 1);
      sum += term;
    }
    return (2 / ROOT_PI) * Math.exp(-x * x) * sum;
  }

  function erfcTail(x) {
    let fraction = x;
    for (let n = 60; n > 0; n--) fraction = x + (0.5 * n) / fraction;
    return Math.exp(-x * x) / (ROOT_PI * fraction);
  }

  /** The normal quantile for 0 < p ≤ ½, by two of Halley's steps from a guess good to 5e-4. */
  function quantile(p) {
    const t = Math.sqrt(-2 * Math.log(p));
    let x = (2.515517 + t * (0.802853 + t * 0.010328)) / (1 + t * (1.432788 + t * (0.189269 + t * 0.001308))) - t;
    for (let step = 0; step < 2; step++) {
      const below = x < -3.5 ? 0.5 * erfcTail(-x / Math.SQRT2) : 0.5 * (1 + erf(x / Math.SQRT2));
      const u = (below - p) * Math.sqrt(2 * Math.PI) * Math.exp(0.5 * x * x);
      x -= u / (1 + 0.5 * x * u);
    }
    return x;
  }

  /** P(0 ≤ z ≤ 1) for a normal z; a point mass where the variance is zero. */
  function normalInside(mean, variance) {
    const spread = Math.sqrt(2 * variance);
    if (!(spread > 0)) return mean >= 0 && mean <= 1 ? 1 : 0;
    return 0.5 * (erf((1 - mean) / spread) + erf(mean / spread));
  }

  // ------------------------------------------------------------------ spectra and processes

  /** `dim` mid-quantiles of the standard normal, ascending; the last ones asked for are kept. */
  let kept = new Float64Array(0);
  function normalShape(dim) {
    if (kept.length === dim) return kept;
    const shape = new Float64Array(dim);
    for (let k = 0; 2 * k + 1 < dim; k++) {
      shape[k] = quantile((k + 0.5) / dim);
      shape[dim - 1 - k] = -shape[k];
    }
    kept = shape;
    return shape;
  }

  function normalSpectrum(mean, std, dim) {
    return normalShape(dim).map((q) => mean + std * q);
  }

  /** The root mean square of `normalShape`, less than one; one for a single eigenvalue, which has no spread. */
  function shapeSpread(dim) {
    if (dim === 1) return 1;
    return Math.sqrt(normalShape(dim).reduce((sum, q) => sum + q * q, 0) / dim);
  }

  /** Whether `dim` real eigenvalues can have this ξ, up to rounding: |ξ| ≤ √dim, and |ξ| = 1 for a single one. */
  function hasSpectrum(xi, dim) {
    const size = Math.abs(xi), rounding = 1e-12;
    return size <= Math.sqrt(dim) * (1 + rounding) && (dim > 1 || size >= 1 - rounding);
  }

  /** Mean and std of the normal whose `dim` mid-quantiles have tr W = ξηλ and tr W² = (ηλ)²; see `hasSpectrum`. */
  function spectrumAt(xi, eta, dim, temperature = 1) {
    const std = eta * Math.sqrt(Math.max(0, 1 - (xi * xi) / dim) / dim);
    return { mean: (temperature * xi * eta) / dim, std: (temperature * std) / shapeSpread(dim) };
  }

  /** tr W and tr W². */
  function traces(eigenvalues) {
    let trace = 0, square = 0;
    for (const w of eigenvalues) {
      trace += w;
      square += w * w;
    }
    return { trace, square };
  }

  /** What the law needs of a token process: s_i, c_i (0-based) and k, from its covariance K. */
  function tokenProcess(kind, tokens, decay = 0) {
    const covariance = {
      walk: (i, j) => Math.min(i, j) + 1,
      ar: (i, j) => Math.pow(decay, Math.abs(i - j)),
      independent: (i, j) => (i === j ? 1 : 0),
    }[kind];
    const rows = new Float64Array(tokens);
    for (let i = 0; i < tokens; i++) {
      for (let j = 0; j < tokens; j++) rows[i] += covariance(i, j);
      rows[i] /= tokens;
    }
    const all = rows.reduce((a, b) => a + b, 0) / tokens;
    const s = rows.map((row, i) => Math.max(0, covariance(i, i) - 2 * row + all));
    const c = rows.map((_, i) => covariance(i, tokens - 1) - rows[tokens - 1]);
    return { kind, tokens, s, c, k: covariance(tokens - 1, tokens - 1) };
  }

  // ------------------------------------------------------------------ ρ

  /** Mean and variance of z_i at every T. */
  function exactMoments(eigenvalues, process, temperature) {
    const { trace, square } = traces(eigenvalues);
    const { s, c, k, tokens } = process;
    const unit = 1 / (temperature * tokens);
    return {
      mean: c.map((value) => 1 / tokens + value * trace * unit),
      variance: c.map((value, i) => (s[i] * k + value * value) * square * unit * unit),
    };
  }

  function gaussianRho(eigenvalues, process, temperature) {
    const { mean, variance } = exactMoments(eigenvalues, process, temperature);
    return mean.map((value, i) => normalInside(value, variance[i]));
  }

  /** The random walk's ρ for large T and d, `form` asymptotic (the right variance) or printed. */
  function largeTRho(eigenvalues, tokens, temperature, form) {
    const { trace, square } = traces(eigenvalues);
    return Float64Array.from({ length: tokens }, (_, i) => {
      const theta = (i + 1) / tokens;
      const variance = (varianceFactor(theta, form) * square) / (temperature * temperature);
      return normalInside(((theta - 0.5) * trace) / temperature, variance);
    });
  }

  function varianceFactor(theta, form) {
    return 2 * theta * theta + 7 / 12 - (form === "asymptotic" ? 2 * theta : 0);
  }

  /** ρ(θ) of Eq. (6) in terms of ξ and η. */
  function rhoCurve(theta, xi, eta, form) {
    return theta.map((value) => {
      const root = Math.sqrt(2 * varianceFactor(value, form));
      const u = (value - 0.5) * xi;
      return 0.5 * (erf(u / root) - erf((u - 1 / eta) / root));
    });
  }

  function exactRho(eigenvalues, process, temperature, tolerance) {
    const spec = quadratic.spectrum(eigenvalues);
    const { s, c, k, tokens } = process;
    const rho = new Float64Array(tokens);
    const hint = [0, 0];
    for (let i = 0; i < tokens; i++) {
      if (i > 0 && s[i] === s[i - 1] && c[i] === c[i - 1]) {
        rho[i] = rho[i - 1]; // independent tokens are all alike but the last
        continue;
      }
      const root = Math.sqrt(k * s[i]);
      const plus = 0.5 * (c[i] + root), minus = 0.5 * (c[i] - root);
      rho[i] = quadratic.interval(spec, plus, minus, -temperature, temperature * (tokens - 1), tolerance, hint);
    }
    return rho;
  }

  // ------------------------------------------------------------------ regimes

  /** The rule of locater.theory.regime. */
  function regime(rho) {
    const tokens = rho.length, parts = Math.min(10, tokens);
    const edge = (n) => roundHalfEven((n * tokens) / parts);
    const tenths = Array.from({ length: parts }, (_, n) => average(rho, edge(n), edge(n + 1)));
    const half = 0.5 * Math.max(...tenths);
    const high = tenths.map((value) => value >= half);
    const first = high[0], last = high[parts - 1];
    if (rho.reduce((a, b) => Math.max(a, b), 0) < 0.1) return "vanishing";
    if (first && last) return "flat";
    return last ? "late" : first ? "early" : "middle";
  }

  function average(values, from, to) {
    let sum = 0;
    for (let i = from; i < to; i++) sum += values[i];
    return sum / (to - from);
  }

  function roundHalfEven(x) {
    const low = Math.floor(x);
    if (x - low !== 0.5) return Math.round(x);
    return low % 2 === 0 ? low : low + 1;
  }

  // ------------------------------------------------------------------ entropy and softmax

  /** The least entropy of attention over T keys whose logits have norm at most ν, in nats: form zhai or printed. */
  function entropyLowerBound(nu, tokens, form) {
    if (form === "printed") {
      const e = Math.exp(-nu);
      return Math.log1p(tokens * e) + (nu * Math.exp(-nu / 2)) / (1 / tokens + e);
    }
    const reach = nu * Math.sqrt(tokens / (tokens - 1));
    const odds = (tokens - 1) * Math.exp(-reach);
    return Math.log1p(odds) + (reach * odds) / (1 + odds);
  }

  /** The root mean square of ‖ω − ω̄‖ over the token process, ω the last query's logits. */
  function logitNorm(eigenvalues, process, temperature) {
    const { mean, variance } = exactMoments(eigenvalues, process, temperature);
    const { tokens } = process;
    return tokens * Math.sqrt(mean.reduce((sum, value, i) => sum + variance[i] + (value - 1 / tokens) ** 2, 0));
  }

  /** The weight of a first token with logit x, the other logits at 0: softmax, its linear piece, sparsemax. */
  function firstWeights(x, tokens) {
    const others = tokens - 1;
    const cut = (value) => Math.min(1, Math.max(0, value));
    return {
      softmax: x > 0 ? 1 / (1 + others * Math.exp(-x)) : Math.exp(x) / (Math.exp(x) + others),
      piecewise: cut((1 + (x * others) / tokens) / tokens),
      sparsemax: cut((1 + x * others) / tokens),
    };
  }

  return {
    REGIMES, entropyLowerBound, erf, exactMoments, exactRho, firstWeights, gaussianRho, hasSpectrum, largeTRho,
    logitNorm, normalSpectrum, regime, rhoCurve, shapeSpread, spectrumAt, tokenProcess, traces,
  };
})();
