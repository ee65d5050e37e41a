/* Softmax weights and ρ of given spectra: simulated walks as points, formulas as lines. */

const FORMULAS = [
  ["exact", "exact law", "first", "solid"],
  ["asymptotic", "for large T", "third", "dotted"],
  ["printed", "as printed in the paper", "second", "dashed"],
];
const DASHES = { solid: "solid", dotted: "2px,2px", dashed: "5px,3px" };

/** Curves over token positions by name: formulas as lines, "simulated" as points. */
function byPosition(label, height, quantity, curves, yaxis) {
  return new Figure(label, height, () => {
    const t = theme();
    const trace = (name, words, look) => {
      const values = Array.from(part(curves[name]));
      const hovertemplate = `<b>%{fullData.name}</b><br>token %{x}<br>${quantity} = %{y:.3g}<extra></extra>`;
      return { type: "scatter", x: values.map((_, k) => k + 1), y: values, name: words, hovertemplate, ...look };
    };
    const data = FORMULAS.filter(([name]) => curves[name]).map(([name, words, colour, dash]) =>
      trace(name, words, { mode: "lines", line: { color: t[colour], dash: DASHES[dash], width: 1.8 } }),
    );
    if (curves.simulated)
      data.push(trace("simulated", "simulated", { mode: "markers", marker: { color: t.text, size: 4, opacity: 0.6 } }));
    return { data, layout: { xaxis: axis("token position"), yaxis: axis(quantity, yaxis) } };
  });
}

function predictedSpectrum(spectrum) {
  const short = (value) => (value == null ? "–" : String(value).replace("-", "−"));
  const { softmax } = spectrum;
  const title = `mean ${short(spectrum.mean)}, std ${short(spectrum.std)}`;
  const made = [el("h4", title)];
  if (softmax) {
    const { exact, simulated } = softmax.entropy;
    const figure = byPosition("softmax weight by token position", 200, "softmax weight", softmax.weights, {
      rangemode: "tozero",
    });
    made.push(
      captioned(["softmax: ", el("b", softmax.regime)], figure),
      el("p.note", `entropy ${shown(exact)} nats predicted, ${shown(simulated)} simulated`),
    );
  }
  const figure = byPosition("ρ by token position", softmax ? 160 : 230, "ρ", spectrum.rho, { range: [-0.02, 1.02] });
  const gap = spectrum.gap.exact;
  made.push(
    captioned(["shape of ρ: ", el("b", spectrum.regime)], figure),
    gap == null ? null : el("p.note", `exact off by at most ${shown(gap, 2)}`),
  );
  return el("div", made);
}

function predictionSection(section) {
  return [
    el(
      "p.note",
      "From the mean and the spread of the eigenvalues alone, and counted in simulated random walks: the weight that ",
      "softmax is expected to give each token, and ρ, the paper's quantity, the probability that a token is on the slope ",
      "of a piecewise linear softmax.",
    ),
    legend(...FORMULAS.map(([, label, colour, dash]) => [swatch(`${colour} ${dash}`), label]), [
      swatch("text point"),
      "simulated",
    ]),
    el("div.triple", section.spectra.map(predictedSpectrum)),
  ];
}
