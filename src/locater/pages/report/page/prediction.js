/* ρ of given spectra: simulated walks as points, formulas as lines. */

const FORMULAS = [
  ["exact", "exact law", "first", "solid"],
  ["asymptotic", "for large T", "third", "dotted"],
  ["printed", "as printed in the paper", "second", "dashed"],
];
const DASHES = { solid: "solid", dotted: "2px,2px", dashed: "5px,3px" };

function spectrumFigure(spectrum) {
  const figure = new Figure("ρ by token position", 230, () => {
    const t = theme();
    const trace = (name, label, look) => {
      const values = Array.from(part(spectrum.rho[name]));
      const hovertemplate = "<b>%{fullData.name}</b><br>token %{x}<br>ρ = %{y:.3f}<extra></extra>";
      return { type: "scatter", x: values.map((_, k) => k + 1), y: values, name: label, hovertemplate, ...look };
    };
    const data = FORMULAS.filter(([name]) => spectrum.rho[name]).map(([name, label, colour, dash]) =>
      trace(name, label, { mode: "lines", line: { color: t[colour], dash: DASHES[dash], width: 1.8 } }),
    );
    if (spectrum.rho.simulated)
      data.push(trace("simulated", "simulated", { mode: "markers", marker: { color: t.text, size: 4, opacity: 0.6 } }));
    return { data, layout: { xaxis: axis("token position"), yaxis: axis("ρ", { range: [-0.02, 1.02] }) } };
  });
  const short = (value) => (value == null ? "–" : String(value).replace("-", "−"));
  const caption = [`mean ${short(spectrum.mean)}, std ${short(spectrum.std)}: `, el("b", spectrum.regime)];
  const gap = spectrum.gap.exact;
  return el(
    "div",
    captioned(caption, figure),
    gap == null ? null : el("p.note", `exact off by at most ${shown(gap, 2)}`),
  );
}

function predictionSection(section) {
  return [
    el(
      "p.note",
      "ρ: the probability that a token is on the slope of the paper's piecewise linear softmax, from the mean and the ",
      "spread of the eigenvalues alone, and counted in simulated random walks. Softmax itself can look elsewhere: ",
      "locater study softmax.",
    ),
    legend(...FORMULAS.map(([, label, colour, dash]) => [swatch(`${colour} ${dash}`), label]), [
      swatch("text point"),
      "simulated",
    ]),
    el("div.triple", section.spectra.map(spectrumFigure)),
  ];
}
