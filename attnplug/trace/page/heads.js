// Layers and heads at a glance: one cell a head, coloured by a measure of what it attends to.
"use strict";

const overview = (() => {
  const element = document.getElementById("heads");
  const menu = document.getElementById("measure");
  const shared = measure.share ? "attention" : "weight";

  // [name, text, the same at length, values(state) -> rows of layers]
  const stored = (name) => () => meta.layers.map((layer) => layer[name]);
  const measures = [
    ["far", `${shared} far back`, `${shared} beyond the first and the last two blocks`, stored("far")],
    ["sink", `${shared} to block 0`, `${shared} to the first block`, stored("sink")],
    ["local", `${shared} nearby`, `${shared} to the own block and the one before`, stored("local")],
  ];
  if (meta.layers.every((layer) => layer.captured)) {
    const words = "share of dense attention that the named blocks hold";
    measures.push(["captured", "dense attention held", words, stored("captured")]);
  }
  measures.push(["listed", "blocks in a list", "blocks that a query block's list has, on average", stored("listed")]);
  meta.masks.forEach((name, index) => {
    const values = () => meta.layers.map((layer) => layer.missed[index]);
    const words = `share of the ${shared} that ${name} misses`;
    measures.push([`missed-${index}`, `missed by ${name}`, words, values]);
  });
  measures.push(
    ["edge", "selected query → key block", `${shared} of the selected query block to the selected key block`, (state) => ofEdge(state)],
    ["block", "all queries → key block", `${shared} of all later queries to the selected key block`, (state) => ofBlock(state)],
  );

  for (const [name, label, words] of measures) {
    menu.add(Object.assign(new Option(label, name), { title: words }));
  }

  async function perHead(visit) {
    const rows = [];
    for (const part of await trace.select(null, null)) {
      rows.push(part.heads.map((head) => visit([{ ...part, heads: [head] }])));
    }
    return rows;
  }

  const total = () => {
    let sum = measure.logarithmic ? 0 : -Infinity;
    return {
      add: (weight) => (sum = measure.logarithmic ? sum + weight : Math.max(sum, weight)),
      value: () => sum,
    };
  };

  const ofEdge = ({ q, k }) =>
    perHead((selection) => {
      const sum = total();
      trace.eachOut(selection, q, null, (other, weight) => other === k && sum.add(weight));
      return measure.mean(sum.value(), q, q + 1, 1);
    });

  const ofBlock = ({ k }) =>
    perHead((selection) => {
      const sum = total();
      trace.eachIn(selection, k, null, (_, weight) => sum.add(weight));
      const from = blocks.queryAt(blocks.key(k)[0]);
      return measure.mean(sum.value(), from, meta.queryBlocks, 1);
    });

  const dynamic = () => ["edge", "block"].includes(menu.value);
  const counts = () => menu.value === "listed";
  const format = (value) => {
    if (counts()) return value.toFixed(1);
    return dynamic() ? measure.format(value) : percent(value);
  };

  let drawn = 0;
  async function draw(state) {
    const turn = ++drawn;
    const [, , words, values] = measures.find(([name]) => name === menu.value);
    const rows = await values(state);
    if (turn !== drawn) return; // a later wish came meanwhile
    const theme = colors.now();
    const font = 0.75 * parseFloat(getComputedStyle(document.documentElement).fontSize);
    const lost = menu.value.startsWith("missed");
    const finite = rows.flat().filter((value) => Number.isFinite(value));
    const most = Math.max(...finite, 0) || 1;
    const low = measure.logarithmic || !dynamic() ? 0 : Math.min(...finite);
    const formatted = rows.map((row) => row.map(format));
    const axis = { color: theme.soft, tickfont: { size: font, color: theme.ink }, zeroline: false, showgrid: false, fixedrange: true };
    const titled = (text) => ({ text, font: { size: font, color: theme.ink }, standoff: 2 });
    const layout = {
      width: element.clientWidth,
      height: element.clientHeight,
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: theme.plot,
      font: { family: "inherit", color: theme.ink },
      margin: { l: 3.4 * font, r: 5 * font, t: 4, b: 3 * font },
      xaxis: { ...axis, ...headTicks(), title: titled("head") },
      yaxis: { ...axis, ...layerTicks(), autorange: "reversed", title: titled("layer") },
      shapes: frame(state, theme),
    };
    const cells = {
      type: "heatmap",
      z: rows,
      customdata: formatted,
      y: rows.map((_, index) => index),
      zmin: low,
      zmax: most,
      xgap: 1,
      ygap: 1,
      colorscale: lost ? theme.missed : theme.weight,
      hovertemplate: "head %{x}, %{customdata}<extra></extra>",
      colorbar: {
        thickness: 0.8 * font,
        outlinewidth: 0,
        len: 1,
        xpad: 4,
        nticks: 4,
        tickformat: counts() || (dynamic() && !measure.share) ? "" : ".2~%",
        tickfont: { size: font, color: theme.ink },
      },
    };
    await Plotly.react(element, [cells], layout, { displayModeBar: false });
    element.setAttribute("aria-label", describe(rows, formatted, words));
    element.dataset.measure = menu.value;
  }

  // Rows are places in the page; their labels are the model's layer numbers.
  function layerTicks() {
    const by = Math.ceil(meta.layers.length / 8);
    const tickvals = meta.layers.map((_, index) => index).filter((index) => index % by === 0);
    return { tickvals, ticktext: tickvals.map((index) => meta.layers[index].layer) };
  }

  function headTicks() {
    const by = Math.ceil(meta.heads / 9);
    const tickvals = [...Array(meta.heads).keys()].filter((head) => head % by === 0);
    return { tickvals, ticktext: tickvals };
  }

  function describe(rows, formatted, words) {
    let best = [0, 0];
    rows.forEach((row, i) => row.forEach((value, j) => {
      if (value > rows[best[0]][best[1]]) best = [i, j];
    }));
    const [i, j] = best;
    const top = `highest in layer ${meta.layers[i].layer}, head ${j}: ${formatted[i][j]}`;
    return `Layers and heads by ${words}; ${top}`;
  }

  function frame({ layer, head }, theme) {
    const x = head === null ? [-0.5, meta.heads - 0.5] : [head - 0.5, head + 0.5];
    const y = layer === null ? [-0.5, meta.layers.length - 0.5] : [layer - 0.5, layer + 0.5];
    const line = { color: theme.mark, width: 2 };
    return [{ type: "rect", x0: x[0], x1: x[1], y0: y[0], y1: y[1], line }];
  }

  function listen(onPick) {
    element.on("plotly_click", ({ points: [point] }) => onPick(point.y, point.x));
  }

  return { draw, listen, dynamic, menu };
})();
