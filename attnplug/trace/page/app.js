// What is chosen, and the controls and keys that choose it.
"use strict";

const app = (() => {
  const MOST_MATCHES = 100000;
  const get = (id) => document.getElementById(id);
  const state = { layer: 0, head: 0, q: 0, k: 0, mask: null, hits: [], hit: -1 };
  const complete = meta.layers.every((layer) => layer.kept.every((share) => share >= 0.99995));
  let selection = [];

  const layerName = () => (state.layer === null ? "all layers" : `layer ${meta.layers[state.layer].layer}`);
  const headName = () => (state.head === null ? "all heads" : `head ${state.head}`);
  const say = (words) => (get("announce").textContent = words);

  // --- choices

  let turn = 0;
  let running = 0;

  async function refresh() {
    running += 1;
    try {
      await follow(++turn);
    } finally {
      running -= 1;
    }
  }

  // Shows what is chosen, unless something else was chosen while its layers were unpacked.
  async function follow(mine) {
    const found = await trace.select(state.layer, state.head);
    if (mine !== turn) return;
    selection = found;
    get("layer").value = state.layer ?? "all";
    get("head").value = state.head ?? "all";
    get("mask").value = state.mask ?? "none";
    await map.draw(selection, state.mask);
    showBlock();
    await overview.draw(state);
    remember();
  }

  function showBlock() {
    const hit = state.hits[state.hit];
    panel.show({ ...state, selection, hit, onSelect: selectBlocks });
  }

  function selectBlocks(q, k) {
    state.q = blocks.clamp(q, meta.queryBlocks);
    state.k = blocks.clamp(k, meta.keyBlocks);
    map.select(state.q, state.k);
    map.reveal();
    showBlock();
    if (overview.dynamic()) overview.draw(state);
    say(`query block ${state.q}, key block ${state.k}: ${get("pair").textContent}`);
    remember();
  }

  function choose(layer, head) {
    Object.assign(state, { layer, head });
    say(`${layerName()}, ${headName()}`);
    return refresh();
  }

  // Through all of them and then "all", around.
  function cycle(name, by, count) {
    const now = state[name] ?? count;
    const next = (now + by + count + 1) % (count + 1);
    return choose(...(name === "layer" ? [or(next, count), state.head] : [state.layer, or(next, count)]));
  }
  const or = (value, count) => (value === count ? null : value);

  function chooseMask(mask) {
    state.mask = mask;
    say(mask === null ? "no mask" : `missed by ${meta.masks[mask]}`);
    return refresh();
  }

  // --- search

  function search(phrase) {
    state.hits = text.find(phrase, MOST_MATCHES);
    state.hit = -1;
    const count = state.hits.length;
    const many = count === MOST_MATCHES ? "the first " : "";
    get("search-status").textContent = phrase.trim()
      ? `${many}${number(count)} ${count === 1 ? "match" : "matches"}`
      : "";
    map.mark(state.hits);
    if (count) pickHit(0);
    else {
      panel.results([], -1, pickHit);
      showBlock();
    }
  }

  function pickHit(index) {
    const count = state.hits.length;
    if (!count) return;
    state.hit = (index + count) % count;
    const { token } = state.hits[state.hit];
    panel.results(state.hits, state.hit, pickHit);
    const current = document.querySelector("#results [aria-current]");
    current?.scrollIntoView({ block: "nearest" });
    get("search-status").textContent = `match ${number(state.hit + 1)} of ${number(count)}`;
    selectBlocks(blocks.queryAt(token), blocks.keyAt(token));
  }

  // --- the address keeps what is shown, so that a view can be sent to others

  let noting = null;
  function remember() {
    clearTimeout(noting);
    noting = setTimeout(note, 300); // browsers refuse an address that changes many times a second
  }

  function note() {
    const { layer, head, q, k } = state;
    const { x, y } = map.view();
    const entries = { layer: layer ?? "all", head: head ?? "all", q, k };
    if (state.mask !== null) entries.mask = meta.masks[state.mask];
    entries.view = [...x, ...y].map((value) => Math.round(value * 100) / 100).join(",");
    history.replaceState(null, "", `#${new URLSearchParams(entries)}`);
  }

  function recall() {
    const entries = new URLSearchParams(location.hash.slice(1));
    const index = (name, count, fallback) => {
      if (entries.get(name) === "all") return null;
      const value = Number.parseInt(entries.get(name) ?? fallback, 10);
      return Number.isInteger(value) ? blocks.clamp(value, count) : fallback;
    };
    state.layer = index("layer", meta.layers.length, 0);
    state.head = index("head", meta.heads, 0);
    state.q = index("q", meta.queryBlocks, meta.queryBlocks - 1) ?? 0;
    state.k = index("k", meta.keyBlocks, 0) ?? 0;
    const mask = meta.masks.indexOf(entries.get("mask"));
    state.mask = mask < 0 ? null : mask;
    map.select(state.q, state.k);
    const view = (entries.get("view") ?? "").split(",").map(Number);
    if (view.length === 4 && view.every(Number.isFinite)) map.setView(view.slice(0, 2), view.slice(2));
  }

  // --- keys

  const keys = [
    ["[ ]", "previous and next layer", { "[": () => cycle("layer", -1, meta.layers.length), "]": () => cycle("layer", 1, meta.layers.length) }],
    [", .", "previous and next head", { ",": () => cycle("head", -1, meta.heads), ".": () => cycle("head", 1, meta.heads) }],
    ["m", "next mask", { m: () => meta.masks.length && chooseMask(or(((state.mask ?? meta.masks.length) + 1) % (meta.masks.length + 1), meta.masks.length)) }],
    ["+ − 0", "zoom in, out, whole trace", { "+": () => map.zoom(0.5), "=": () => map.zoom(0.5), "-": () => map.zoom(2), 0: () => map.reset() }],
    ["/", "search; n and N: next and previous match", { "/": () => get("search").focus(), n: () => pickHit(state.hit + 1), N: () => pickHit(state.hit - 1) }],
    ["t", "dark or light", { t: () => colors.toggle() }],
    ["?", "these keys", { "?": () => get("help").showModal() }],
  ];
  const onMap = [
    ["← → ↑ ↓", "on the map: select the next key or query block; with Shift: move the map", {
      ArrowLeft: (shift) => arrow(-1, 0, shift),
      ArrowRight: (shift) => arrow(1, 0, shift),
      ArrowUp: (shift) => arrow(0, -1, shift),
      ArrowDown: (shift) => arrow(0, 1, shift),
    }],
    ["Enter", "on the map: zoom to the selected block", { Enter: () => map.zoomTo() }],
  ];

  function arrow(dx, dy, shift) {
    if (shift) return map.pan(dx / 4, dy / 4);
    const { kStep, qStep } = map.step();
    return selectBlocks(state.q + dy * qStep, state.k + dx * kStep);
  }

  function onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || get("help").open) return;
    if (event.target.matches("input, select, textarea")) return;
    const inMap = event.target === get("map");
    for (const [, , actions] of inMap ? [...keys, ...onMap] : keys) {
      const action = actions[event.key];
      if (!action) continue;
      event.preventDefault();
      action(event.shiftKey);
      return;
    }
  }

  // --- the page

  const weighs = {
    mass: "weighed by the share of attention among the blocks that the trace names",
    value: "weighed by the length of what they add to the output",
    score: "weighed by their highest product of query and key",
  };

  // Phrases about the trace. A page of a phone's width leaves out the `wide` ones.
  function facts() {
    const sizes = new Set(meta.steps.map(([, queries]) => queries > 1));
    const parts = [
      `${number(meta.tokens)} tokens`,
      `${number(meta.layers.length)} ${meta.layers.length === 1 ? "layer" : "layers"} of ${meta.heads} heads`,
      meta.queryBlock === meta.keyBlock ? `blocks of ${meta.keyBlock}` : `blocks of ${meta.queryBlock} queries and ${meta.keyBlock} keys`,
    ];
    const wide = parts.push(`lists of ${average("listed").toFixed(1)} blocks on average`) - 1;
    if (sizes.has(false)) parts.push(`${number(meta.steps.filter(([, n]) => n === 1).length)} decode steps`);
    if (meta.policy) parts.push(`policy ${meta.policy}`);
    parts.push(complete ? "every edge in this page" : `in this page: each query block's ${meta.keep} heaviest edges, ${percent(average("kept"))} of the weight`);
    return parts.map((part, i) => {
      const phrase = document.createElement("span");
      phrase.textContent = i === 0 ? part : ` · ${part}`;
      if (i === wide) phrase.className = "wide";
      return phrase;
    });
  }

  // The mean over layers and heads of what the file says of each.
  function average(name) {
    const values = meta.layers.flatMap((layer) => layer[name]);
    return values.reduce((sum, value) => sum + value, 0) / values.length;
  }

  function describeView(frame) {
    const cell = frame.kStep === 1 && frame.qStep === 1
      ? "a cell is a block"
      : `a cell is ${frame.qStep} × ${frame.kStep} blocks`;
    const sums = complete ? "" : trace.usesGrid(frame) ? ", all edges" : ", edges in the page";
    get("shown").textContent = `${capital(layerName())}, ${headName()} · ${cell}${sums}`;
    remember();
  }
  const capital = (words) => words[0].toUpperCase() + words.slice(1);

  function readout(cell) {
    if (!cell) {
      get("readout").textContent = "Click a cell to select it, drag to zoom, scroll to zoom, ? for keys";
      return;
    }
    const value = Number.isFinite(cell.value) && cell.value > 0 || !measure.logarithmic
      ? measure.format(cell.value) : "no edge";
    const lost = cell.missed === null || value === "no edge" ? "" : `, ${percent(cell.missed)} of it missed`;
    const from = `queries: ${panel.range(cell.queries)} → keys: ${panel.range(cell.keys)}: ${value}${lost}`;
    const words = cell.single && meta.text ? `${panel.snippet(cell.queries, 44)}  →  ${panel.snippet(cell.keys, 44)}` : "";
    get("readout").textContent = `${from}\n${words}`;
  }

  function fillMenus() {
    meta.layers.forEach(({ layer }, index) => get("layer").add(new Option(layer, index)));
    get("layer").add(new Option("all layers", "all"));
    for (let head = 0; head < meta.heads; head++) get("head").add(new Option(head, head));
    get("head").add(new Option("all heads", "all"));
    get("mask").add(new Option("none", "none"));
    meta.masks.forEach((name, index) => get("mask").add(new Option(name, index)));
    get("mask-field").hidden = meta.masks.length === 0;
    for (const [shown, what] of [...onMap, ...keys]) {
      get("keys").append(panel.make("dt", {}, panel.make("kbd", {}, shown)), panel.make("dd", {}, what));
    }
    const versions = Object.entries(meta.versions).map(([name, value]) => `${name} ${value}`);
    get("provenance").textContent = `${number(meta.edges)} edges in the trace, ${weighs[meta.weights]}. ${versions.join(", ")}. ${meta.checksum}`;
  }

  function wire() {
    const value = (id, none) => (get(id).value === none ? null : Number(get(id).value));
    get("layer").onchange = () => choose(value("layer", "all"), state.head);
    get("head").onchange = () => choose(state.layer, value("head", "all"));
    get("mask").onchange = () => chooseMask(value("mask", "none"));
    get("layer-previous").onclick = () => cycle("layer", -1, meta.layers.length);
    get("layer-next").onclick = () => cycle("layer", 1, meta.layers.length);
    get("head-previous").onclick = () => cycle("head", -1, meta.heads);
    get("head-next").onclick = () => cycle("head", 1, meta.heads);
    get("zoom-in").onclick = () => map.zoom(0.5);
    get("zoom-out").onclick = () => map.zoom(2);
    get("zoom-block").onclick = () => map.zoomTo();
    get("zoom-reset").onclick = () => map.reset();
    get("theme-button").onclick = () => colors.toggle();
    get("help-button").onclick = () => get("help").showModal();
    get("hit-previous").onclick = () => pickHit(state.hit - 1);
    get("hit-next").onclick = () => pickHit(state.hit + 1);
    get("search-form").onsubmit = (event) => {
      event.preventDefault();
      pickHit(state.hit + 1);
    };
    let pause = null;
    get("search").oninput = () => {
      clearTimeout(pause);
      pause = setTimeout(() => search(get("search").value), 150);
    };
    overview.menu.onchange = () => overview.draw(state);
    document.addEventListener("keydown", onKey);
    map.onView(describeView);
    map.listen(selectBlocks, readout);
    overview.listen((layer, head) => choose(layer, head));
    for (const id of ["map", "heads"]) fit(get(id));
    colors.onChange(themed);
  }

  // A plot follows its box, which also changes with what stands beside it.
  function fit(element) {
    let size = [element.clientWidth, element.clientHeight].join();
    new ResizeObserver(() => {
      const now = [element.clientWidth, element.clientHeight].join();
      if (now === size) return;
      size = now;
      if (element.id === "map") map.redraw();
      else overview.draw(state);
    }).observe(element);
  }

  function themed() {
    get("theme-button").textContent = colors.theme() === "dark" ? "Light" : "Dark";
    get("theme-button").title = "Dark or light (t)";
    map.redraw();
    if (selection.length) overview.draw(state);
  }

  // To begin with, the last query block and what it attends to most, the first block and its own
  // aside: every query attends to those.
  function selectSomething() {
    const q = meta.queryBlocks - 1;
    const own = blocks.keyAt(blocks.query(q)[0]);
    const list = trace.collect(trace.eachOut, selection, q, null);
    const best = list.find(({ block }) => block > 0 && block < own - 1) ?? list[0];
    selectBlocks(q, best?.block ?? own);
  }

  async function start() {
    colors.apply();
    get("theme-button").textContent = colors.theme() === "dark" ? "Light" : "Dark";
    get("facts").replaceChildren(...facts());
    fillMenus();
    if (!meta.text) {
      get("search").disabled = true;
      get("search-status").textContent = "The trace has no text.";
    }
    const fresh = !location.hash;
    recall();
    readout(null);
    await text.load();
    await refresh();
    if (fresh) selectSomething();
    wire();
    describeView(map.step());
    document.body.dataset.ready = Math.round(performance.now());
  }

  return { start, complete, selectBlocks, busy: () => running > 0, shown: () => ({ ...state }) };
})();

app.start().catch((error) => {
  document.getElementById("shown").textContent = `This browser cannot show the trace: ${error.message}`;
  throw error;
});
