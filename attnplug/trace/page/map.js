// The block map: a heat map of the part in view, summed to the cells that a screen can show.
"use strict";

const map = (() => {
  const element = document.getElementById("map");
  const MOST_CELLS = 600;
  const FEWEST_BLOCKS = 4;
  const GRID_CELLS = 96;
  // A press so near the one before it goes on with a double click.
  const DOUBLE_MS = 500;
  const DOUBLE_PIXELS = 5;
  const size = { x: meta.keyBlocks, y: meta.queryBlocks };
  let view = { x: [0, size.x], y: [0, size.y] }; // in blocks; y from the top down
  let drawn = null; // what the last draw was made of
  let selected = { q: 0, k: 0 };
  let hits = [];
  const listeners = { select: [], view: [] };

  function step(blocks) {
    let value = 1;
    while (blocks / value > MOST_CELLS) value *= 2;
    return value;
  }

  // Whole bins that cover the view.
  function window_() {
    const [k0, k1] = view.x;
    const [q0, q1] = view.y;
    let kStep = step(k1 - k0);
    let qStep = step(q1 - q0);
    // Where the page lacks edges, the grid's cells are the truth until they get too large to read.
    const many = (length, most, by) => length / by >= GRID_CELLS || length >= 0.6 * most;
    const { grid } = meta;
    if (grid && many(k1 - k0, size.x, grid.kStep) && many(q1 - q0, size.y, grid.qStep)) {
      kStep = Math.max(kStep, grid.kStep);
      qStep = Math.max(qStep, grid.qStep);
    }
    const down = (value, by) => Math.max(0, Math.floor(value / by) * by);
    const up = (value, by, most) => Math.min(most, Math.ceil(value / by) * by);
    return {
      kStep,
      qStep,
      k0: down(k0, kStep),
      k1: up(k1, kStep, size.x),
      q0: down(q0, qStep),
      q1: up(q1, qStep, size.y),
    };
  }

  // Values of the cells as rows: weights, and apart those of which the mask misses more than half.
  function cells(selection, frame, mask) {
    const { sum, missed, rows, columns } = trace.bin(selection, frame, mask);
    const count = heads(selection);
    const kept = [];
    const lost = [];
    for (let i = 0; i < rows; i++) {
      const from = frame.q0 + i * frame.qStep;
      const to = Math.min(from + frame.qStep, frame.q1);
      const row = new Float32Array(columns).fill(NaN);
      const other = new Float32Array(columns).fill(NaN);
      for (let j = 0; j < columns; j++) {
        const value = sum[i * columns + j];
        if (measure.logarithmic ? !(value > 0) : value === -Infinity) continue;
        const mean = measure.mean(value, from, to, count);
        const shown = measure.logarithmic ? Math.log10(mean) : mean;
        (missed && missed[i * columns + j] > value / 2 ? other : row)[j] = shown;
      }
      kept.push(row);
      lost.push(other);
    }
    return { kept, lost, sum, missed, columns };
  }

  // The colour range belongs to the whole trace, so that layers and heads can be compared.
  const range = (() => {
    if (measure.share) return [-4, 0];
    const ends = meta.layers.flatMap((layer) => layer.range);
    const [low, high] = [Math.min(...ends), Math.max(...ends)];
    return measure.logarithmic ? [Math.max(low, high - 9) / Math.LN10, high / Math.LN10] : [low, high];
  })();

  // The bar beside the map; with a mask two of them, which share their labels.
  function bar(title, x) {
    const { ink } = colors.now();
    const values = measure.share ? [-4, -3, -2, -1, 0] : undefined;
    return {
      title: { text: title, side: "right", font: { size: fontSize(), color: ink } },
      showticklabels: Boolean(title),
      tickvals: values,
      ticktext: values?.map((value) => percent(10 ** value)),
      tickprefix: !values && measure.logarithmic ? "10^" : "",
      tickfont: { size: fontSize(), color: ink },
      thickness: 0.8 * fontSize(),
      outlinewidth: 0,
      len: 1,
      x,
      xpad: 6,
    };
  }

  const fontSize = () => 0.8 * parseFloat(getComputedStyle(document.documentElement).fontSize);

  const titles = {
    mass: "share of a query's attention",
    value: "length of the value added",
    score: "highest score",
  };

  function traces(frame, values, mask) {
    const theme = colors.now();
    const common = {
      type: "heatmap",
      x0: frame.k0 + frame.kStep / 2,
      dx: frame.kStep,
      y0: frame.q0 + frame.qStep / 2,
      dy: frame.qStep,
      zmin: range[0],
      zmax: range[1],
      hoverinfo: "none",
    };
    const title = titles[meta.weights];
    const colorbar = bar(mask === null ? title : "", 1);
    const list = [{ ...common, z: values.kept, colorscale: theme.weight, colorbar }];
    if (mask !== null) {
      const words = `${title}: kept, and missed by ${meta.masks[mask]}`;
      const beside = bar(words, 1 + (1.3 * fontSize()) / element.clientWidth);
      list.push({ ...common, z: values.lost, colorscale: theme.missed, colorbar: beside });
    }
    list.push(...hitMarks(theme));
    return list;
  }

  // Matches of the search: ticks along the upper and the left side, as many as can be told apart.
  function hitMarks(theme) {
    const marks = ([low, high], blockOf) => {
      const by = Math.max(1, (high - low) / 300);
      const places = new Set();
      for (const { token } of hits) {
        const block = blockOf(token);
        if (block >= low - 1 && block < high) places.add(Math.floor(block / by));
      }
      return [...places].map((place) => (place + 0.5) * by);
    };
    const keys = marks(view.x, blocks.keyAt);
    const queries = marks(view.y, blocks.queryAt);
    const marker = { color: theme.hit, size: 0.9 * fontSize() };
    const common = { type: "scatter", mode: "markers", hoverinfo: "none", cliponaxis: true };
    return [
      { ...common, x: keys, y: keys.map(() => 1), yaxis: "y2", marker: { ...marker, symbol: "triangle-down" } },
      { ...common, y: queries, x: queries.map(() => 0), xaxis: "x2", marker: { ...marker, symbol: "triangle-right" } },
    ];
  }

  function ticks([from, to], tokenOf, most) {
    let by = 1;
    while ((to - from) / by > most) by *= 2;
    const tickvals = [];
    for (let at = Math.ceil(from / by) * by; at < to; at += by) tickvals.push(at);
    const ticktext = tickvals.map((at) => tokenLabel(tokenOf(at)));
    return { tickmode: "array", tickvals, ticktext };
  }

  function tokenLabel(token) {
    if (token >= 1 << 20 && token % (1 << 18) === 0) return `${token / (1 << 20)}M`;
    return token >= 512 && token % 512 === 0 ? `${token / 1024}K` : number(token);
  }

  function layout(mask) {
    const theme = colors.now();
    const font = fontSize();
    const axis = {
      color: theme.soft,
      gridcolor: theme.grid,
      zeroline: false,
      showgrid: false,
      ticks: "outside",
      ticklen: 4,
      linecolor: theme.grid,
      mirror: true,
      ticklabeloverflow: "allow",
      tickfont: { size: font, color: theme.ink },
    };
    const hidden = { visible: false, fixedrange: true, range: [0, 1] };
    const titled = (text) => ({ text, font: { size: font, color: theme.ink }, standoff: 4 });
    return {
      width: element.clientWidth,
      height: element.clientHeight,
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: theme.plot,
      font: { family: "inherit", color: theme.ink },
      margin: { l: 5.2 * font, r: (mask === null ? 6.5 : 7.8) * font, t: 6, b: 3.6 * font },
      showlegend: false,
      dragmode: "zoom",
      xaxis: {
        ...axis,
        ...ticks(view.x, (k) => k * meta.keyBlock, 8),
        range: [...view.x],
        title: titled("key token"),
        minallowed: 0,
        maxallowed: size.x,
      },
      yaxis: {
        ...axis,
        ...ticks(view.y, (q) => blocks.query(blocks.clamp(q, size.y))[0], 8),
        range: [view.y[1], view.y[0]],
        title: titled("query token"),
        minallowed: 0,
        maxallowed: size.y,
      },
      xaxis2: { ...hidden, overlaying: "x" },
      yaxis2: { ...hidden, overlaying: "y" },
      shapes: shapes(theme),
    };
  }

  // The selected edge: its row, its column, and a frame that is never too small to see.
  function shapes(theme) {
    const { q, k } = selected;
    const line = { color: theme.mark, width: 1 };
    const wide = Math.max(1, (view.x[1] - view.x[0]) / 90);
    const high = Math.max(1, (view.y[1] - view.y[0]) / 90);
    // A band as thin as a line must show, one as wide as a block must not hide what it crosses.
    const band = (length) => {
      const width = Math.max(1, length / 400);
      const opacity = Math.max(0.07, Math.min(0.3, (5 * width) / length ** 1.2));
      return { half: width / 2, look: { type: "rect", line: { width: 0 }, fillcolor: theme.mark, opacity } };
    };
    const [row, column] = [band(view.y[1] - view.y[0]), band(view.x[1] - view.x[0])];
    return [
      { ...row.look, xref: "paper", x0: 0, x1: 1, y0: q + 0.5 - row.half, y1: q + 0.5 + row.half },
      { ...column.look, yref: "paper", y0: 0, y1: 1, x0: k + 0.5 - column.half, x1: k + 0.5 + column.half },
      {
        type: "rect",
        line: { ...line, width: 2 },
        x0: k + 0.5 - wide / 2,
        x1: k + 0.5 + wide / 2,
        y0: q + 0.5 - high / 2,
        y1: q + 0.5 + high / 2,
      },
    ];
  }

  let drawing = 0;
  async function draw(selection, mask) {
    drawing += 1;
    const frame = window_();
    const started = performance.now();
    const values = cells(selection, frame, mask);
    drawn = { selection, mask, frame, values };
    const config = {
      displayModeBar: false,
      scrollZoom: true,
      doubleClick: false,
    };
    await Plotly.react(element, traces(frame, values, mask), layout(mask), config);
    drawing -= 1;
    element.dataset.milliseconds = Math.round(performance.now() - started);
    for (const listener of listeners.view) listener(frame);
  }

  const redraw = () => drawn && draw(drawn.selection, drawn.mask);

  let pending = null;
  function setView(x, y) {
    view = { x: within(x, size.x), y: within(y, size.y) };
    if (pending === null) {
      pending = setTimeout(() => {
        pending = null;
        redraw();
      }, 30);
    }
  }

  // At least a few blocks, at most all of them, and never beyond the ends.
  function within([low, high], most) {
    const length = Math.min(most, Math.max(Math.min(FEWEST_BLOCKS, most), high - low));
    const from = Math.max(0, Math.min(most - length, (low + high - length) / 2));
    return [from, from + length];
  }

  function zoom(factor, center = selected) {
    const about = ([low, high], at) => {
      const inside = at >= low && at <= high ? at : (low + high) / 2;
      return [inside - (inside - low) * factor, inside + (high - inside) * factor];
    };
    setView(about(view.x, center.k + 0.5), about(view.y, center.q + 0.5));
  }

  function reveal() {
    const move = ([low, high], at) =>
      at >= low && at < high ? [low, high] : [at - (high - low) / 2, at + (high - low) / 2];
    setView(move(view.x, selected.k), move(view.y, selected.q));
  }

  function zoomTo(count = 32) {
    const around = (at) => [at + 0.5 - count / 2, at + 0.5 + count / 2];
    setView(around(selected.k), around(selected.q));
  }

  function pan(dx, dy) {
    const move = ([low, high], by) => [low + by * (high - low), high + by * (high - low)];
    setView(move(view.x, dx), move(view.y, dy));
  }

  function select(q, k) {
    selected = { q: blocks.clamp(q, size.y), k: blocks.clamp(k, size.x) };
    if (element.layout) Plotly.relayout(element, { shapes: shapes(colors.now()) });
  }

  // The block pair at a place on the screen; in a cell of many, its heaviest edge.
  function at(event) {
    const { xaxis, yaxis } = element._fullLayout;
    const box = element.getBoundingClientRect();
    const k = Math.floor(xaxis.p2d(event.clientX - box.left - xaxis._offset));
    const q = Math.floor(yaxis.p2d(event.clientY - box.top - yaxis._offset));
    return q >= 0 && k >= 0 && q < size.y && k < size.x ? { q, k } : null;
  }

  function heaviest({ q, k }) {
    const { frame, selection } = drawn;
    const start = (value, from, by) => from + Math.floor((value - from) / by) * by;
    const q0 = start(q, frame.q0, frame.qStep);
    const k0 = start(k, frame.k0, frame.kStep);
    let best = { q, k, weight: -Infinity };
    for (let row = q0; row < Math.min(q0 + frame.qStep, size.y); row++) {
      trace.eachOut(selection, row, null, (other, weight) => {
        if (other >= k0 && other < k0 + frame.kStep && weight > best.weight) {
          best = { q: row, k: other, weight };
        }
      });
    }
    return best;
  }

  // What the cell at a block pair says, for the line below the map.
  function read({ q, k }) {
    const { frame, values, selection } = drawn;
    const i = Math.floor((q - frame.q0) / frame.qStep);
    const j = Math.floor((k - frame.k0) / frame.kStep);
    const place = i * values.columns + j;
    const from = frame.q0 + i * frame.qStep;
    const to = Math.min(from + frame.qStep, frame.q1);
    const sum = values.sum[place];
    const missed = values.missed ? values.missed[place] / (sum || 1) : null;
    const first = frame.k0 + j * frame.kStep;
    return {
      queries: [blocks.query(from)[0], blocks.query(to - 1)[1]],
      keys: [blocks.key(first)[0], blocks.key(Math.min(first + frame.kStep, frame.k1) - 1)[1]],
      value: sum > -Infinity ? measure.mean(sum, from, to, heads(selection)) : NaN,
      missed,
      single: frame.qStep === 1 && frame.kStep === 1,
    };
  }

  function listen(onSelect, onRead) {
    element.on("plotly_relayout", (change) => {
      if (!Object.keys(change).some((name) => /^[xy]axis\.range/.test(name))) return;
      const { xaxis, yaxis } = element.layout;
      setView([...xaxis.range], [yaxis.range[1], yaxis.range[0]]);
    });
    // What Plotly hands on of a click has no place on the screen in every version of it, and may
    // come late: a double click has moved the map by then. What was pressed is what was there. Of
    // presses in quick succession that is the first: a later one may find the map moved already.
    let pressed = null;
    let last = { timeStamp: -Infinity };
    const press = (event) => {
      const apart = Math.hypot(event.clientX - last.clientX, event.clientY - last.clientY);
      const goesOn = event.timeStamp - last.timeStamp < DOUBLE_MS && apart < DOUBLE_PIXELS;
      last = event;
      if (goesOn) return;
      const place = at(event);
      pressed = place && heaviest(place);
    };
    element.addEventListener("pointerdown", press, { capture: true });
    element.on("plotly_click", () => pressed && onSelect(pressed.q, pressed.k));
    element.on("plotly_doubleclick", () => zoomTo());
    element.addEventListener("mousemove", (event) => {
      const place = at(event);
      onRead(place && read(place));
    });
    element.addEventListener("mouseleave", () => onRead(null));
  }

  return {
    draw,
    redraw,
    listen,
    select,
    reveal,
    zoom,
    zoomTo,
    pan,
    step: () => drawn.frame,
    reset: () => setView([0, size.x], [0, size.y]),
    view: () => view,
    busy: () => drawing > 0 || pending !== null,
    setView,
    onView: (listener) => listeners.view.push(listener),
    mark(matches) {
      hits = matches;
      return redraw();
    },
  };
})();
