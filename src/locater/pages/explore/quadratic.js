// The exact law of ρ: locater.theory.quadratic, for the forms that a symmetric W_QK gives.
//
//     y = Σ_k w_k (p g_k² + m h_k²),   p ≥ 0 ≥ m,   g, h independent standard normals
//
// is (x_i − x̄)ᵀ W_QK x_T for eigenvalues w and one position i; p and m come from the 2 × 2 covariance of the
// position and the query, the same for every eigenvalue. Its cumulant generating function is
//
//     K(s) = −½ Σ_k log f_k,   f_k = (1 − 2 p w_k s)(1 − 2 m w_k s) = 1 − 2(p + m) s w_k + 4 p m s² w_k²,
//
// so one pass over d eigenvalues does the work of 2d weights. As in Python, P(y > x) is the integral of
// exp(K(s) − s x)/(2πi s) along the hyperbola s(τ) = s₀ + A(±cos ψ (cosh τ − 1) + i sin ψ sinh τ) through the minimum
// of K(s) − s x − log s, and the trapezoidal rule converges geometrically in its step. Here the step is halved from
// 1 on, each sum running until its terms are negligible: the nodes τ are then the same for all positions.
const quadratic = (() => {
  const COS = Math.cos((3 * Math.PI) / 8); // ψ = 67.5°
  const SIN = Math.sin((3 * Math.PI) / 8);
  const NEGLIGIBLE = 1e-14; // of the largest weight: a smaller one is a rounding error of an exact zero
  const FAR = 200; // standard deviations; less than e^(−70) lies beyond
  const TAU_MAX = 90;
  const LEVELS = 11; // the last step is 2⁻¹⁰
  const HUGE = 1e120; // of squared moduli; a product is scaled before it can overflow
  const SETTLED = 1e-7; // a halving squares the relative error, so what is returned is much better
  const SETTLING = 1e-2; // of the sum, after the halving before: sums that agree by chance on the way do not pass

  // cosh τ and sinh τ, alternating, at the nodes that level L adds: τ = 0, 1, 2, … and then odd multiples of 2⁻ᴸ.
  const tables = [];
  function nodesOf(level) {
    if (!tables[level]) {
      const step = 2 ** -level;
      const count = level === 0 ? TAU_MAX : Math.ceil(TAU_MAX / (2 * step));
      const table = new Float64Array(2 * count);
      for (let j = 0; j < count; j++) {
        const tau = level === 0 ? j : (2 * j + 1) * step;
        table[2 * j] = Math.cosh(tau);
        table[2 * j + 1] = Math.sinh(tau);
      }
      tables[level] = table;
    }
    return tables[level];
  }

  /** The eigenvalues that count, their extremes and sums; what all positions share. */
  function spectrum(eigenvalues) {
    let largest = 0;
    for (const w of eigenvalues) largest = Math.max(largest, Math.abs(w));
    const w = Float64Array.from(eigenvalues).filter((value) => Math.abs(value) > NEGLIGIBLE * largest);
    let sum = 0, square = 0, top = 0, bottom = 0;
    for (const value of w) {
      sum += value;
      square += value * value;
      top = Math.max(top, value);
      bottom = Math.min(bottom, value);
    }
    return { w, sum, square, top, bottom };
  }

  /** P(low ≤ y ≤ high) for the form with multipliers `plus` ≥ 0 ≥ `minus`. `hint` carries s₀ from one position on. */
  function interval(spec, plus, minus, low, high, tolerance = SETTLED, hint = [0, 0]) {
    const size = Math.max(plus, -minus);
    const p = plus > NEGLIGIBLE * size ? plus : 0;
    const m = -minus > NEGLIGIBLE * size ? minus : 0;
    const spread = Math.sqrt(2 * (p * p + m * m) * spec.square);
    if (!(spread > 0)) return low <= 0 && high >= 0 ? 1 : 0; // y is the constant 0
    const above = below(spec, p / spread, m / spread, high / spread, tolerance, hint, 0);
    const under = below(spec, p / spread, m / spread, low / spread, tolerance, hint, 1);
    return Math.min(1, Math.max(0, above - under));
  }

  /** P(y < x) for a form of unit variance, from the tail that does not hold the mean. */
  function below(spec, p, m, x, tolerance, hint, which) {
    if (x >= spec.sum * (p + m)) return 1 - upperTail(spec, p, m, x, tolerance, hint, which);
    return upperTail(spec, -m, -p, -x, tolerance, hint, which);
  }

  /** P(y > x) where the mean of y is at most x. */
  function upperTail(spec, p, m, x, tolerance, hint, which) {
    const top = Math.max(spec.top * p, spec.bottom * m); // the largest weight
    if (!(top > 0) && x >= 0) return 0; // y is never positive
    if (x >= spec.sum * (p + m) + FAR) return 0;
    const path = crossing(spec, p, m, x, top, hint[which]);
    hint[which] = path.s;
    const scale = 2 / Math.sqrt(path.curvature);
    const opening = x >= 0 ? COS : -COS;
    let total = 0, change = Infinity;
    for (let level = 0; level < LEVELS; level++) {
      const sum = (2 ** -level / Math.PI) * alongPath(spec.w, p, m, x, path.s, scale, opening, level);
      const refined = level === 0 ? sum : 0.5 * total + sum;
      const before = change;
      change = level === 0 ? Infinity : Math.abs(refined - total);
      total = refined;
      if (change < tolerance && before < SETTLING * (Math.abs(total) + tolerance)) return total;
    }
    throw new Error("the exact law did not settle: the eigenvalues span too many orders of magnitude");
  }

  /** The minimum of K(s) − s x − log s on 0 < s < 1/(2 top), roughly, and the second derivative there. */
  function crossing(spec, p, m, x, top, guess) {
    const { w } = spec;
    const end = top > 0 ? 0.5 / top : Infinity;
    let s = guess > 0 && guess < 0.95 * end ? guess : Math.min(1, 0.5 * end);
    let low = 0, high = end, curvature = 1;
    for (let step = 0; step < 100; step++) {
      let first = 0, second = 0;
      for (let k = 0; k < w.length; k++) {
        const a = p * w[k], b = m * w[k];
        const u = a / (1 - 2 * a * s), v = b / (1 - 2 * b * s);
        first += u + v;
        second += u * u + v * v;
      }
      const slope = first - x - 1 / s;
      curvature = 2 * second + 1 / (s * s);
      if (slope < 0) low = s;
      else high = s;
      const newton = -slope / curvature;
      if (Math.abs(newton) * Math.sqrt(curvature) < 0.05) break;
      const next = s + newton;
      s = next > low && next < high ? next : high === Infinity ? 4 * s : 0.5 * (low + high);
    }
    return { s, curvature };
  }

  /** The sum, over the nodes of a level, of Im[exp(K(s) − s x) (ds/dτ)/s]. */
  function alongPath(w, p, m, x, s0, scale, opening, level) {
    const table = nodesOf(level);
    const across = 2 * (p + m), product = 4 * p * m;
    let sum = 0;
    for (let j = 0; j < table.length; j += 2) {
      const cosh = table[j], sinh = table[j + 1];
      const sr = s0 + scale * opening * (cosh - 1), si = scale * SIN * sinh;
      const dr = scale * opening * sinh, di = scale * SIN * cosh;
      // Π f_k as (re + i im) e^logs, and how often its angle, followed factor by factor, passes π. No f_k turns by π
      // or more: s never meets a ray, and the two weights of an eigenvalue turn in opposite directions.
      const ar = across * sr, ai = across * si;
      const br = product * (sr * sr - si * si), bi = product * 2 * sr * si;
      let re = 1, im = 0, turns = 0, logs = 0;
      for (let k = 0; k < w.length; k++) {
        const v = w[k];
        const fr = 1 - v * (ar - v * br), fi = v * (v * bi - ai);
        const nr = re * fr - im * fi, ni = re * fi + im * fr;
        const wasUp = im >= 0;
        if (wasUp !== ni >= 0 && wasUp === fi >= 0) turns += wasUp ? 1 : -1;
        re = nr;
        im = ni;
        if ((k & 3) === 3) {
          const modulus = re * re + im * im;
          if (modulus > HUGE || modulus < 1 / HUGE) {
            const root = Math.sqrt(modulus);
            logs += Math.log(root);
            re /= root;
            im /= root;
          }
        }
      }
      const modulus = Math.exp(-0.25 * Math.log(re * re + im * im) - 0.5 * logs - sr * x);
      const angle = -0.5 * (Math.atan2(im, re) + 2 * Math.PI * turns) - si * x;
      const size = sr * sr + si * si;
      const qr = (dr * sr + di * si) / size, qi = (di * sr - dr * si) / size; // (ds/dτ)/s
      const term = modulus * (Math.cos(angle) * qi + Math.sin(angle) * qr);
      sum += level === 0 && j === 0 ? 0.5 * term : term;
      if (modulus * Math.hypot(qr, qi) < 1e-11) break; // the modulus only falls
    }
    return sum;
  }

  return { spectrum, interval };
})();
