// Softmax attention of the last token: locater.theory.attention, exact, for a symmetric W_QK. Needs theory.js, and
// SOFTMAX, the numbers and words of locater.theory.softmax_regime.
//
// Given the query the logits are normal and depend on it through a = k Σ w g²/λ and b = k Σ w² g²/λ², g the query along
// the eigenvectors. Tokens are Markov: the logits are a chain from the query's own, ω_T = a, back,
//
//     ω_i = slope_i ω_(i+1) + √b spread_i n_i,   n standard normal.
//
// The eigenvalues are mean + std·q, q the normal's mid-quantiles, so that Σ g², Σ q g² and Σ q² g² are all it takes.
// g and n lie on lattices, each shifted at random once and for all: a slider moves the law, not the points. How far the
// lattices' means are apart gives the standard error.
const attention = (() => {
  const LATTICES = 16;
  const POINTS = 509, ROOT = 110; // coordinate j of point p is p·110ʲ/509 mod 1
  const SAMPLES = LATTICES * POINTS;
  const QUERY = 127; // the query's first coordinate; those before are the other tokens', the nearest to it first
  const QUANTILES = 1 << 16;
  const FINE = 64; // a table of exponentials has steps of 1/64; two terms of the series leave 1e-7
  const NEGLIGIBLE = -45; // the logarithm of a share of the largest weight
  const exponentials = Float64Array.from({ length: 1 - FINE * NEGLIGIBLE }, (_, n) => Math.exp(-n / FINE));

  // ------------------------------------------------------------------ points

  let quantiles = null;
  const columns = [];

  /** A standard normal for every sample, by coordinate. */
  function normals(coordinate) {
    if (columns[coordinate]) return columns[coordinate];
    quantiles ??= theory.normalSpectrum(0, 1 / theory.shapeSpread(QUANTILES), QUANTILES);
    const random = generator(coordinate), column = new Float32Array(SAMPLES);
    let step = 1;
    for (let j = 0; j < coordinate; j++) step = (step * ROOT) % POINTS;
    for (let start = 0; start < SAMPLES; start += POINTS) {
      const shift = random();
      for (let p = 0; p < POINTS; p++) {
        column[start + p] = quantiles[Math.floor(QUANTILES * (((p * step) % POINTS) / POINTS + shift)) % QUANTILES];
      }
    }
    return (columns[coordinate] = column);
  }

  /** Numbers between 0 and 1 (mulberry32). */
  function generator(seed) {
    let state = Math.imul(seed + 1, 0x9e3779b9);
    return () => {
      state = (state + 0x6d2b79f5) | 0;
      let t = Math.imul(state ^ (state >>> 15), state | 1);
      t ^= t + Math.imul(t ^ (t >>> 7), t | 61);
      return ((t ^ (t >>> 14)) >>> 0) / 2 ** 32;
    };
  }

  // ------------------------------------------------------------------ a, b and the chain

  let kept = { d: 0 };

  /** Σ g², Σ q g² and Σ q² g² of every sample; the last ones asked for are kept. */
  function sums(d) {
    if (kept.d === d) return kept;
    const [s0, s1, s2] = [0, 1, 2].map(() => new Float64Array(SAMPLES));
    theory.normalSpectrum(0, 1, d).forEach((q, j) => {
      const column = normals(QUERY + j);
      for (let n = 0; n < SAMPLES; n++) {
        const square = column[n] * column[n];
        s0[n] += square;
        s1[n] += q * square;
        s2[n] += q * q * square;
      }
    });
    return (kept = { d, s0, s1, s2 });
  }

  /** a and √b of every sample, for d eigenvalues of this mean and std. */
  function scalars({ mean, std, d, temperature }, { k }, samples) {
    const { s0: all, s1, s2 } = sums(d), s0 = all.subarray(0, samples);
    const squares = (n) => Math.max(0, mean * mean * s0[n] + 2 * mean * std * s1[n] + std * std * s2[n]);
    return {
      a: s0.map((s, n) => (k / temperature) * (mean * s + std * s1[n])),
      rootB: s0.map((_, n) => Math.sqrt(k * squares(n)) / temperature),
    };
  }

  /** The same by the three-number law, which is that of d → ∞: a is normal, b is its mean. */
  function scalarsOfMany({ xi, eta }, { k }, samples) {
    const a = Float64Array.from(normals(QUERY).subarray(0, samples), (n) => k * eta * (xi + Math.SQRT2 * n));
    return { a, rootB: a.map(() => Math.sqrt(k) * eta) };
  }

  /** How each token depends on the one after it, the query's neighbour first. */
  function chain(kind, tokens, decay) {
    const walk = kind === "walk", constant = kind === "ar" ? decay : 0;
    const slope = Float64Array.from({ length: tokens - 1 }, (_, j) => (walk ? 1 - 1 / (tokens - j) : constant));
    return { tokens, k: walk ? tokens : 1, slope, spread: slope.map((s) => Math.sqrt(walk ? s : 1 - s * s)) };
  }

  // ------------------------------------------------------------------ softmax

  /** Expected weights and entropy (nats) with their standard errors. */
  function expected({ a, rootB }, { tokens, slope, spread }, lattices) {
    const values = new Float64Array(tokens * POINTS), top = new Float64Array(POINTS); // (tokens, points), query first
    const found = Array.from({ length: lattices }, (_, lattice) => {
      const start = lattice * POINTS;
      for (let p = 0; p < POINTS; p++) values[p] = top[p] = a[start + p];
      for (let j = 1; j < tokens; j++) {
        const column = normals(j - 1), m = slope[j - 1], s = spread[j - 1];
        for (let p = 0, at = j * POINTS; p < POINTS; p++, at++) {
          values[at] = m * values[at - POINTS] + s * rootB[start + p] * column[start + p];
          if (values[at] > top[p]) top[p] = values[at];
        }
      }
      return means(values, top, tokens, slope[0] === 0);
    });
    const mean = found[0].map((_, j) => found.reduce((sum, each) => sum + each[j], 0) / lattices);
    const error = mean.map((m, j) => {
      const square = found.reduce((sum, each) => sum + (each[j] - m) ** 2, 0);
      return Math.sqrt(square / (lattices * (lattices - 1)));
    });
    const weights = mean.slice(0, tokens).reverse(), weightsError = error.slice(0, tokens).reverse();
    return { weights, weightsError, entropy: mean[tokens], entropyError: error[tokens] };
  }

  /** The mean weights of logits (tokens, points), which are overwritten, and the mean entropy after them. */
  function means(logits, top, tokens, alike) {
    const total = new Float64Array(POINTS), dot = new Float64Array(POINTS), found = new Float64Array(tokens + 1);
    for (let j = 0, at = 0; j < tokens; j++) {
      for (let p = 0; p < POINTS; p++, at++) {
        const below = logits[at] - top[p];
        logits[at] = 0;
        if (below < NEGLIGIBLE) continue;
        const n = (0.5 - FINE * below) | 0, rest = below + n / FINE;
        const e = exponentials[n] * (1 + rest * (1 + 0.5 * rest));
        logits[at] = e;
        total[p] += e;
        dot[p] += e * below;
      }
    }
    for (let p = 0; p < POINTS; p++) {
      found[tokens] += Math.max(0, Math.log(total[p]) - dot[p] / total[p]) / POINTS;
      total[p] = 1 / (POINTS * total[p]);
    }
    for (let j = 0, at = 0; j < tokens; j++) {
      for (let p = 0; p < POINTS; p++, at++) found[j] += logits[at] * total[p];
    }
    if (alike) found.fill((1 - found[0]) / (tokens - 1), 1, tokens); // independent tokens, but for the query
    return found;
  }

  /** All of it for the page's settings; in the limit, that of d alone, T being what it is: softmax has none in T. */
  function law(settings, lattices = LATTICES) {
    const limit = settings.mode === "limit";
    const tokens = chain(limit ? "walk" : settings.process, settings.T, settings.decay);
    const found = expected((limit ? scalarsOfMany : scalars)(settings, tokens, lattices * POINTS), tokens, lattices);
    return { ...found, regime: regime(found) };
  }

  /** The rule of locater.theory.attention_regime: a key of SOFTMAX.words. */
  function regime({ weights, entropy }) {
    const tokens = weights.length, share = entropy / Math.log(tokens);
    if (share >= SOFTMAX.uniformFrom) return "uniform";
    if (share <= SOFTMAX.collapsedTo) return weights[tokens - 1] >= 0.5 ? "collapsed itself" : "collapsed others";
    const near = weights.slice(Math.floor(tokens / 2)).reduce((sum, weight) => sum + weight, 0);
    return near >= SOFTMAX.nearFrom ? "local near" : near <= SOFTMAX.farTo ? "local far" : "local anywhere";
  }

  return { SAMPLES, law, regime };
})();
