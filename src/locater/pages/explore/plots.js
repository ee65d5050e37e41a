// The four pictures, each a function of what is to be seen. Colours come from the style sheet, light or dark.
// Needs theory.js, plane.js and plotly.js.
const plots = (() => {
  const FORMS = {
    exact: { name: "exact law", dash: "solid", width: 2.6 },
    gaussian: { name: "Gaussian, finite T", dash: "dot", width: 2 },
    asymptotic: { name: "Eq. (6) corrected", dash: "dashdot", width: 2 },
    printed: { name: "Eq. (6) printed", dash: "dash", width: 2 },
  };
  // Softmax's regimes in colours of ρ's: what is near the query is late.
  const SHADES = {
    uniform: "flat", "local near": "late", "local far": "early", "local anywhere": "middle",
    "collapsed itself": "itself", "collapsed others": "vanishing",
  };
  const CONFIG = { displayModeBar: false, scrollZoom: false };
  const FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif';

  function colour(name) {
    return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  }

  function regimeColour(name) {
    return colour(SHADES[name] ?? name);
  }

  function axis(title, more = {}) {
    return {
      title: { text: title, standoff: 8, font: { size: 13 } }, fixedrange: true, zeroline: false, ticks: "outside",
      ticklen: 4, tickcolor: colour("rule"), linecolor: colour("rule"), showline: true, gridcolor: colour("grid"),
      tickfont: { size: 12, color: colour("soft") }, ...more,
    };
  }

  function layout(div, xaxis, yaxis, more = {}) {
    return {
      width: div.clientWidth, height: div.clientHeight,
      margin: { l: 52, r: 10, t: 10, b: 46 }, font: { family: FONT, size: 13, color: colour("ink") },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false, dragmode: false,
      hoverlabel: { bgcolor: colour("raised"), bordercolor: colour("rule"), font: { color: colour("ink"), size: 12 } },
      xaxis, yaxis, ...more,
    };
  }

  function line(name, x, y, dash, width, hue, more = {}) {
    return { type: "scatter", mode: "lines", name, x, y, line: { color: hue, width, dash }, ...more };
  }

  function legend(x, xanchor) {
    const look = { font: { size: 12 }, bgcolor: "rgba(0,0,0,0)", itemclick: false };
    return { showlegend: true, legend: { x, y: 1, xanchor, yanchor: "top", ...look } };
  }

  /** ρ over θ by every formula that is known and not hidden, and below it softmax's weights. */
  function rho(div, { theta, rho: curves, softmax: { weights } }, hidden) {
    const discrete = "exact" in curves;
    const traces = Object.keys(FORMS).reverse().filter((form) => form in curves).map((form) => {
      const { name, dash, width } = FORMS[form];
      const marked = form === "exact" && theta.length <= 64;
      const token = discrete ? { customdata: theta.map((value) => Math.round(value * theta.length)) } : {};
      return line(name, theta, curves[form], dash, width, colour(form), {
        ...token, mode: marked ? "lines+markers" : "lines", marker: { size: 4.5, color: colour(form) },
        visible: !hidden.has(form),
        hovertemplate: discrete && form === "exact" ? "%{y:.6f}, token %{customdata}" : "%{y:.6f}",
      });
    });
    const x = axis("relative position <i>θ</i> = <i>i</i>/<i>T</i>", { range: [0, 1.01], hoverformat: ".3f" });
    const y = axis("<i>ρ</i>", { range: [-0.03, 1.04], domain: [0.4, 1] });
    const T = weights.length, even = 1 / T, top = 1.12 * Math.max(1.5 * even, ...weights);
    const yaxis2 = axis("", { range: [0, top], domain: [0, 0.26], nticks: 4 });
    const hue = colour("softmax"), thickness = Math.max(1.5, (0.6 * (div.clientWidth - 62)) / T);
    const bars = { type: "data", symmetric: false, array: [0], arrayminus: weights, color: hue, thickness, width: 0 };
    traces.push(line("softmax", Array.from(weights, (_, i) => (i + 1) / T), weights, "solid", 0, hue, {
      yaxis: "y2", mode: "markers", marker: { size: 1, color: hue }, error_y: bars, hovertemplate: "%{y:.3g}",
    }));
    const dotted = { width: 1, dash: "dot", color: colour("soft") };
    const shapes = [{ type: "line", yref: "y2", x0: 0, x1: 1.01, y0: even, y1: even, line: dotted }];
    const annotations = [{
      text: "<b>softmax</b>: expected weight; dotted 1/<i>T</i>", showarrow: false, font: { size: 12, color: hue },
      xref: "paper", x: 0, xanchor: "left", yref: "paper", y: 0.27, yanchor: "bottom",
    }];
    const more = { yaxis2, shapes, annotations, hovermode: "x unified", hoversubplots: "axis" };
    return Plotly.react(div, traces, layout(div, { ...x, anchor: "y2" }, y, more), CONFIG);
  }

  /** The regimes over (ξ, η) as far as they are known, and the current point. The vertical axis is log₁₀ η. */
  function plane(div, { xi, eta, regimes, names, localises, done }, point) {
    const words = names.map((name) => SOFTMAX.words[name] ?? name), height = Array.from(eta, Math.log10);
    const rows = height.map((_, r) => Array.from(xi, (_, c) => regimes[r * xi.length + c]));
    const place = (c, r) => `<i>ξ</i> = ${xi[c].toPrecision(3)}, <i>η</i> = ${eta[r].toPrecision(3)}`;
    const text = () => rows.map((row, r) => row.map((found, c) => `${place(c, r)}: ${words[found] ?? "no spectrum"}`));
    const shades = ["unknown", ...names].map(regimeColour); // for −1 and below, 0, 1, …
    const scale = shades.flatMap((shade, k) => [[k / shades.length, shade], [(k + 1) / shades.length, shade]]);
    const map = {
      type: "heatmap", x: xi, y: height, z: rows, zmin: -1.5, zmax: names.length - 0.5, colorscale: scale,
      showscale: false, ...(done ? { text: text(), hovertemplate: "%{text}<extra></extra>" } : { hoverinfo: "skip" }),
    };
    const widest = xi[xi.length - 1], low = height[0], high = height[height.length - 1];
    const edge = widest * (1 + 1 / (xi.length - 1)); // with the outer half of the last column
    const x = axis("<i>ξ</i> = tr <i>W</i> / √tr <i>W</i>²", { range: [-edge, edge], showgrid: false });
    const decades = Array.from({ length: Math.round(high - low) + 1 }, (_, k) => Math.round(low) + k);
    const y = axis("<i>η</i> = √tr <i>W</i>² / <i>λ</i>", {
      range: [low, high], showgrid: false, tickvals: decades, ticktext: decades.map((n) => `10${superscript(n)}`),
    });
    const annotations = labels({ xi, height, regimes, names }), traces = [map];
    if (localises) {
      traces.push(...threshold(widest, low, high));
      annotations.push(thresholdLabel(widest, low, high));
    }
    const more = { annotations, shapes: mark(point), hovermode: "closest" };
    return Plotly.react(div, traces, layout(div, x, y, more), CONFIG);
  }

  function superscript(n) {
    return String(n).replace("-", "⁻").replace(/\d/g, (digit) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[digit]);
  }

  /** |ξη| = 2 within the axes, but for the middle, where both lines would run into one. */
  function threshold(widest, low, high) {
    const from = Math.max(Math.log10(2 / widest), low), to = Math.min(Math.log10(2 / (0.04 * widest)), high);
    const height = Float64Array.from({ length: 60 }, (_, k) => from + ((to - from) * k) / 59);
    return [1, -1].map((sign) =>
      line("", height.map((h) => (sign * 2) / 10 ** h), height, "dash", 1.2, colour("ink"), { hoverinfo: "skip" }));
  }

  function thresholdLabel(widest, low, high) {
    const x = 0.62 * widest, y = Math.min(Math.max(Math.log10(2 / x), low), high);
    return { x, y, text: "<i>ξη</i> = 2", showarrow: false, yshift: 11, font: { size: 11 } };
  }

  function movePoint(div, point) {
    return Plotly.relayout(div, { shapes: mark(point) });
  }

  /** A ring and its centre, rimmed so that they are seen on every colour. */
  function mark({ xi, eta }) {
    if (!Number.isFinite(xi) || !(eta > 0)) return [];
    const ring = (radius, fill, stroke, width) => ({
      type: "circle", xsizemode: "pixel", ysizemode: "pixel", xanchor: xi, yanchor: Math.log10(eta),
      x0: -radius, x1: radius, y0: -radius, y1: radius, fillcolor: fill, line: { color: stroke, width },
    });
    return [
      ring(8, "rgba(0,0,0,0)", colour("paper"), 5), ring(8, "rgba(0,0,0,0)", colour("ink"), 2),
      ring(2.5, colour("ink"), colour("paper"), 1),
    ];
  }

  /** Each regime's name where there is most room for it: far from the others, and of such places the most central. */
  function labels({ xi, height, regimes, names }) {
    const columns = xi.length, rows = height.length, reach = 16; // half a name's width in columns
    const room = distances(regimes, columns, rows);
    return names.flatMap((name, k) => {
      const text = name.replace("collapsed ", "collapsed on ").replace(" ", "<br>");
      let best = -1, score = Math.max(...text.split("<br>").map((part) => part.length)); // what a name needs
      for (let n = 0; n < regimes.length; n++) {
        const c = n % columns, side = Math.min(c, columns - 1 - c);
        if (regimes[n] !== k || side < reach) continue;
        const value = Math.min(room[n], reach) + side / columns;
        if (value > score) [best, score] = [n, value];
      }
      if (best < 0) return [];
      const c = best % columns, r = (best - c) / columns;
      return [{ x: xi[c], y: height[r], text: `<b>${text}</b>`, showarrow: false, font: { size: 13 } }];
    });
  }

  /** How far, in points each way, every point is from another regime or the edge: two sweeps. */
  function distances(regimes, columns, rows) {
    const room = new Int16Array(regimes.length);
    const nearest = (n, offsets) => {
      const c = n % columns, r = (n - c) / columns;
      if (c === 0 || r === 0 || c === columns - 1 || r === rows - 1) return 1;
      return Math.min(...offsets.map((offset) => (regimes[n + offset] === regimes[n] ? room[n + offset] + 1 : 1)));
    };
    const before = [-1, -columns - 1, -columns, -columns + 1];
    for (let n = 0; n < room.length; n++) room[n] = nearest(n, before);
    for (let n = room.length - 1; n >= 0; n--) room[n] = Math.min(room[n], nearest(n, before.map((offset) => -offset)));
    return room;
  }

  /** Both bounds over ν, with the largest entropy there is and the spectrum's own ν. */
  function entropy(div, tokens, nu) {
    const x = Float64Array.from({ length: 601 }, (_, k) => (12 * k) / 600);
    const [printed, zhai] = ["printed", "zhai"].map((form) => x.map((v) => theory.entropyLowerBound(v, tokens, form)));
    const top = 1.08 * printed.reduce((a, b) => Math.max(a, b), 0), ceiling = Math.log(tokens);
    const note = (text, more) => ({ text, showarrow: false, font: { size: 12, color: colour("soft") }, ...more });
    const annotations = [
      note(`ln <i>T</i> = ${ceiling.toFixed(2)}`, { x: 5, xanchor: "left", y: ceiling, yanchor: "top" }),
    ];
    const straight = (x0, x1, y0, y1, look) => ({ type: "line", x0, x1, y0, y1, line: { width: 1, ...look } });
    const shapes = [straight(0, 12, ceiling, ceiling, { color: colour("ink") })];
    if (nu !== undefined && nu <= 12) {
      shapes.push(straight(nu, nu, 0, top, { color: colour("soft"), dash: "dot" }));
      const side = nu > 6 ? { xanchor: "right", xshift: -4 } : { xanchor: "left", xshift: 4 };
      annotations.push(note("this spectrum", { x: nu, y: 0.06 * top, yanchor: "bottom", ...side }));
    }
    const traces = [
      line("Eq. (9) printed", x, printed, "dash", 2, colour("printed"), { hovertemplate: "%{y:.4f} nats" }),
      line("Zhai et al.", x, zhai, "solid", 2.4, colour("exact"), { hovertemplate: "%{y:.4f} nats" }),
    ];
    const xaxis = axis("<i>ν</i>, norm of a query's logits", { range: [0, 12], hoverformat: ".2f" });
    const yaxis = axis("entropy ≥ (nats)", { range: [0, top] });
    const more = { annotations, shapes, hovermode: "x unified", ...legend(1, "right") };
    return Plotly.react(div, traces, layout(div, xaxis, yaxis, more), CONFIG);
  }

  /** Softmax, the piecewise linear map and sparsemax, from where they all but vanish to where they are all but one. */
  function softmax(div, tokens) {
    const reach = tokens + Math.max(4, tokens / 4);
    const x = Float64Array.from({ length: 401 }, (_, k) => -reach + (2 * reach * k) / 400);
    const weights = Array.from(x, (value) => theory.firstWeights(value, tokens));
    const curve = (key, name, dash, hue) =>
      line(name, x, weights.map((weight) => weight[key]), dash, 2, hue, { hovertemplate: "%{y:.4f}" });
    const traces = [
      curve("sparsemax", "sparsemax", "dot", colour("gaussian")),
      curve("softmax", "softmax", "solid", colour("softmax")),
      curve("piecewise", "piecewise linear", "solid", colour("exact")),
    ];
    const xaxis = axis("<i>ω</i>₁, the other logits at 0", { range: [-reach, reach], hoverformat: ".2f" });
    const yaxis = axis("weight", { range: [-0.03, 1.04] });
    const more = { hovermode: "x unified", ...legend(0.01, "left") };
    return Plotly.react(div, traces, layout(div, xaxis, yaxis, more), CONFIG);
  }

  return { FORMS, entropy, movePoint, plane, regimeColour, rho, softmax };
})();
