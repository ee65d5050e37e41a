// The regimes over the (ξ, η) plane, coarse first: locater.theory.regime_map_at and regime_map on a grid, or those of
// softmax. Needs theory.js and attention.js.
const plane = (() => {
  const COLUMNS = 129, ROWS = 97; // ξ and η; both one more than a multiple of COARSEST
  const COARSEST = 16;
  const UNKNOWN = -1, NO_SPECTRUM = -2; // beside the indices of NAMES
  const NAMES = { rho: theory.REGIMES, softmax: Object.keys(SOFTMAX.words) };
  const LATTICES = 4; // of softmax, of 16: the same points everywhere, so borders are smooth
  const TOLERANCE = 1e-4; // of ρ: halving once more squares it, and a regime's borders stay where they are

  /** The ξ of the columns, over what |ξ| ≤ √d allows, and the η of the rows, evenly in log η. */
  function axes({ widest, low, high }) {
    const xi = Float64Array.from({ length: COLUMNS }, (_, c) => widest * ((2 * c) / (COLUMNS - 1) - 1));
    const eta = Float64Array.from({ length: ROWS }, (_, r) => low * (high / low) ** (r / (ROWS - 1)));
    return { xi, eta };
  }

  /** A function that names the regime at (ξ, η) for these settings: an index of NAMES, or NO_SPECTRUM. */
  function classifier(settings) {
    return settings.map === "softmax" ? softmaxClassifier(settings) : rhoClassifier(settings);
  }

  function softmaxClassifier(settings) {
    const { mode, d } = settings, temperature = 1;
    return (xi, eta) => {
      if (mode !== "limit" && !theory.hasSpectrum(xi, d)) return NO_SPECTRUM;
      const spectrum = mode === "limit" ? { xi, eta } : theory.spectrumAt(xi, eta, d);
      return NAMES.softmax.indexOf(attention.law({ ...settings, ...spectrum, temperature }, LATTICES).regime);
    };
  }

  function rhoClassifier(settings) {
    const name = (rho) => NAMES.rho.indexOf(theory.regime(rho));
    if (settings.mode === "limit") {
      const theta = Float64Array.from({ length: 200 }, (_, k) => (k + 0.5) / 200);
      return (xi, eta) => name(theory.rhoCurve(theta, xi, eta, "asymptotic"));
    }
    const process = theory.tokenProcess(settings.process, settings.T, settings.decay);
    return (xi, eta) => {
      if (!theory.hasSpectrum(xi, settings.d)) return NO_SPECTRUM;
      const { mean, std } = theory.spectrumAt(xi, eta, settings.d);
      return name(theory.exactRho(theory.normalSpectrum(mean, std, settings.d), process, 1, TOLERANCE));
    };
  }

  /** Fills `grid` (rows of columns, UNKNOWN to begin with), coarse to fine, and yields the step whenever `classify` was
   * asked and at the end of each pass. A point whose coarser neighbours are all of one regime is taken to be of it;
   * at the end every such guess that has come to lie at a border is asked for too. */
  function* refine(grid, classify) {
    const guessed = new Uint8Array(grid.length);
    for (let step = COARSEST; step >= 1; step /= 2) {
      for (let r = 0; r < ROWS; r += step) {
        for (let c = 0; c < COLUMNS; c += step) {
          const place = r * COLUMNS + c;
          if (grid[place] !== UNKNOWN) continue;
          const around = step === COARSEST ? UNKNOWN : commonRegime(grid, c, r, 2 * step);
          guessed[place] = around >= 0 ? 1 : 0;
          grid[place] = around >= 0 ? around : classify(c, r);
          if (around < 0) yield step;
        }
      }
      yield step;
    }
    for (let open = true; open; ) {
      open = false;
      for (let place = 0; place < grid.length; place++) {
        const c = place % COLUMNS, r = (place - c) / COLUMNS;
        if (!guessed[place] || !atBorder(grid, c, r)) continue;
        guessed[place] = 0;
        const found = classify(c, r);
        open ||= found !== grid[place];
        grid[place] = found;
        yield 1;
      }
    }
  }

  /** The regime at the corners of the cell (or edge) of size `wide` that (c, r) lies in, or UNKNOWN if they differ. */
  function commonRegime(grid, c, r, wide) {
    const left = c - (c % wide), right = c % wide ? left + wide : left;
    const low = r - (r % wide), high = r % wide ? low + wide : low;
    const corner = grid[low * COLUMNS + left];
    const others = [low * COLUMNS + right, high * COLUMNS + left, high * COLUMNS + right];
    return others.every((place) => grid[place] === corner) ? corner : UNKNOWN;
  }

  /** Whether a point next to (c, r) is of another regime. */
  function atBorder(grid, c, r) {
    const place = r * COLUMNS + c, own = grid[place];
    return (
      (c > 0 && grid[place - 1] !== own) || (c < COLUMNS - 1 && grid[place + 1] !== own) ||
      (r > 0 && grid[place - COLUMNS] !== own) || (r < ROWS - 1 && grid[place + COLUMNS] !== own)
    );
  }

  /** The grid with what is not known yet taken from the nearest coarser point that is. */
  function preview(grid) {
    return grid.map((found, place) => {
      const c = place % COLUMNS, r = (place - c) / COLUMNS;
      for (let step = 2; found === UNKNOWN && step <= COARSEST; step *= 2) {
        found = grid[Math.round(r / step) * step * COLUMNS + Math.round(c / step) * step];
      }
      return found;
    });
  }

  return { COLUMNS, NAMES, ROWS, UNKNOWN, axes, classifier, preview, refine };
})();
