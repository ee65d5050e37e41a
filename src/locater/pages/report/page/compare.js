/* Two members beside each other: ρ over training, final spectra. */

/** The member that most others are compared with, and the one to put beside it. */
function firstPair(members) {
  const first = Math.max(members.findIndex(isWithout), 0);
  const same = (member) => member.seed === members[first].seed && member.kappa !== members[first].kappa;
  const one = members.findIndex((member) => same(member) && member.kappa === 1);
  const other = one >= 0 ? one : members.findLastIndex(same);
  return [first, other >= 0 ? other : members.length - 1];
}

/** Which two are chosen, the selects that choose them, and what follows the choice. */
class Pair {
  constructor(section) {
    this.section = section;
    this.labels = section.members.map((member) => member.label);
    this.members = firstPair(section.members);
    this.sides = section.members.length > 1 ? [0, 1] : [0];
    this.following = []; // figures, and functions
  }

  /** The name of one of the two, wherever it stands. */
  name(side) {
    const made = el("b");
    const show = () => (made.textContent = this.labels[this.members[side]]);
    this.following.push({ refresh: show });
    show();
    return made;
  }

  choose(side, member) {
    this.members[side] = member;
    this.refresh();
  }

  refresh() {
    for (const each of this.following) each.refresh();
  }

  selects() {
    return this.sides.map((side) =>
      choice(["member", "beside"][side], this.labels, this.members[side], (member) => this.choose(side, member)),
    );
  }
}

function rhoMap(pair, side, state) {
  const {
    steps,
    positions,
    values,
    range: [low, high],
  } = pair.section.rho;
  const figure = new Figure("ρ over training and token position", 280, () => {
    const rows = rowsOf(part(values, pair.members[side], state.part), positions.length); // steps × positions
    const map = {
      type: "heatmap",
      x: steps,
      y: positions,
      z: transposed(rows),
      zmin: low,
      zmax: high,
      colorscale: "Cividis",
      colorbar: colourBar("ρ"),
      hovertemplate: "step %{x:,}<br>token %{y}<br>ρ = %{z:.3f}<extra></extra>",
    };
    const empty = rows.every((row) => row.every((value) => value === null));
    const layout = {
      xaxis: axis("updates", { showgrid: false, range: steps.length > 1 ? [steps[0], steps.at(-1)] : undefined }),
      yaxis: axis("token position", { showgrid: false }),
      annotations: empty ? [remark("no ρ recorded")] : [],
      margin: { r: BESIDE_BAR },
    };
    return { data: [map], layout };
  });
  pair.following.push(figure);
  return captioned(["ρ, ", pair.name(side)], figure);
}

function rhoPart(pair) {
  const { parts } = pair.section.rho;
  const state = { part: 0 };
  const set = (index) => {
    state.part = index;
    pair.refresh();
  };
  return [
    el("h3", "ρ over training"),
    el("div.controls", pair.selects(), parts.length > 1 ? choice("heads", parts, 0, set) : null),
    el(
      "div.pair",
      pair.sides.map((side) => rhoMap(pair, side, state)),
    ),
    el(
      "p.note",
      "ρ: share of blocks in which a token is on the slope of the paper's piecewise linear softmax, for the last query; ",
      "softmax itself can look elsewhere. One colour scale for all members.",
    ),
  ];
}

function spectrumFigures(pair, state) {
  const cloud = (side) => complex(part(pair.section.spectra.values, pair.members[side], state.part));
  const colour = (side) => [theme().first, theme().second][side];
  const clouds = pair.sides.map(
    (side) =>
      new Figure("eigenvalues in the complex plane", 320, () => {
        // one range for both, so that they compare
        const reach = 1.08 * Math.max(extent(pair.sides.flatMap(cloud).flat().map(Math.abs))[1], 1e-9);
        return {
          data: [points(cloud(side), colour(side), 6)],
          layout: {
            xaxis: axis("Re w", { range: [-reach, reach], constrain: "domain" }),
            yaxis: axis("Im w", { range: [-reach, reach], constrain: "domain", scaleanchor: "x" }),
            shapes: crossHair(),
          },
        };
      }),
  );
  const shares = new Figure("share of eigenvalues up to a real part", 320, () => {
    const data = pair.sides.map((side) => {
      const real = cloud(side)
        .map(([re]) => re)
        .sort((a, b) => a - b);
      return {
        type: "scatter",
        mode: "lines",
        x: real,
        y: real.map((_, k) => (k + 1) / real.length),
        name: escaped(pair.labels[pair.members[side]]),
        line: { shape: "hv", width: 1.8, color: colour(side), dash: side ? "5px,2px" : "solid" },
        hovertemplate: "<b>%{fullData.name}</b><br>%{y:.0%} up to %{x:.4g}<extra></extra>",
      };
    });
    const share = axis("share of eigenvalues", { range: [0, 1.01], tickformat: ".0%" });
    return { data, layout: { xaxis: axis("Re w"), yaxis: share } };
  });
  return [clouds, shares];
}

function spectraPart(pair) {
  const { spectra, rho } = pair.section;
  const head = el("h3", "Final spectra");
  if (!spectra)
    return [
      head,
      el("p.note", "The records hold no eigenvalues: a run writes them with its last step, unless its setting `details` is off."),
    ];
  const state = { part: 0 };
  const [clouds, shares] = spectrumFigures(pair, state);
  pair.following.push(...clouds, shares);
  const set = (index) => {
    state.part = index;
    pair.refresh();
  };
  const controls = [rho ? [] : pair.selects(), spectra.parts.length > 1 ? choice("head", spectra.parts, 0, set) : []];
  return [
    head,
    controls.flat().length ? el("div.controls", controls) : [],
    el(
      "p.note",
      ["The eigenvalues w of ", ...math("W_QK"), " in the last record. Real parts: the share of eigenvalues up to "],
      "each, so that a concentrated spectrum is steep.",
    ),
    el(
      "div.triple",
      pair.sides.map((side) => captioned([swatch(side ? "second" : "first"), pair.name(side)], clouds[side])),
      captioned([pair.sides.length > 1 ? "real parts of both" : "real parts"], shares),
    ),
  ].flat();
}
