// The trace inside the page: unpacks it, layer by layer, and sums edges. Nothing here draws.
"use strict";

const meta = JSON.parse(document.getElementById("meta").textContent);

const trace = (() => {
  const layers = new Map();
  const tables = new Map();

  // A data element is emptied once read: a page of many megabytes is in memory once.
  async function unpack(id) {
    const element = document.getElementById(id);
    const text = atob(element.textContent);
    element.remove();
    const packed = new Uint8Array(text.length);
    for (let i = 0; i < text.length; i++) packed[i] = text.charCodeAt(i);
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Uint8Array(await new Response(stream).arrayBuffer());
  }

  // Weights are one byte: 0 is none, 1..255 even steps from low to high (of the logarithm, but of
  // scores, which may be negative).
  function table([low, high], logarithmic) {
    const values = new Float32Array(256);
    for (let code = 1; code < 256; code++) {
      const value = low + ((code - 1) / 254) * (high - low);
      values[code] = logarithmic ? Math.exp(value) : value;
    }
    return values;
  }

  function weights(layer, name) {
    const key = `${name}-${layer}`;
    if (!tables.has(key)) {
      tables.set(key, table(meta.layers[layer][name], meta.weights !== "score"));
    }
    return tables.get(key);
  }

  // Edges of all heads of a layer: row = head * queryBlocks + query block; start[row] its first
  // edge; k ascending in a row.
  function decode(bytes, layer) {
    const rows = meta.heads * meta.queryBlocks;
    const start = new Uint32Array(rows + 1);
    for (let row = 0; row < rows; row++) start[row + 1] = start[row] + bytes[row];
    const count = start[rows];
    const part = (index) => bytes.subarray(rows + index * count, rows + (index + 1) * count);
    const [low, high, weight] = [part(0), part(1), part(2)];
    const k = new Uint16Array(count);
    for (let row = 0; row < rows; row++) {
      let last = 0;
      for (let edge = start[row]; edge < start[row + 1]; edge++) {
        last += low[edge] | (high[edge] << 8);
        k[edge] = last;
      }
    }
    const seen = meta.masks.map((_, index) => part(3 + index));
    const grids = [];
    if (meta.grid) {
      const size = meta.heads * meta.grid.rows * meta.grid.columns;
      const from = rows + (3 + meta.masks.length) * count;
      for (let index = 0; index <= meta.masks.length; index++) {
        grids.push(bytes.subarray(from + index * size, from + (index + 1) * size));
      }
    }
    return { start, k, weight, seen, grids, value: weights(layer, "range") };
  }

  function load(layer) {
    if (!layers.has(layer)) {
      layers.set(layer, unpack(`layer-${layer}`).then((bytes) => decode(bytes, layer)));
    }
    return layers.get(layer);
  }

  // What is shown, as [{layer, heads, edges}]; null stands for all.
  async function select(layer, head) {
    const chosen = layer === null ? meta.layers.map((_, index) => index) : [layer];
    const heads = head === null ? [...Array(meta.heads).keys()] : [head];
    return Promise.all(
      chosen.map(async (index) => ({ layer: index, heads, edges: await load(index) })),
    );
  }

  // Calls visit(k, weight, missed) for each edge of query block q.
  function eachOut(selection, q, mask, visit) {
    for (const { heads, edges } of selection) {
      const seen = mask === null ? null : edges.seen[mask];
      for (const head of heads) {
        const row = head * meta.queryBlocks + q;
        for (let edge = edges.start[row]; edge < edges.start[row + 1]; edge++) {
          const weight = edges.value[edges.weight[edge]];
          visit(edges.k[edge], weight, seen ? 1 - seen[edge] / 255 : 0);
        }
      }
    }
  }

  // Calls visit(q, weight, missed) for each edge into key block k.
  function eachIn(selection, k, mask, visit) {
    for (const { heads, edges } of selection) {
      const seen = mask === null ? null : edges.seen[mask];
      for (const head of heads) {
        for (let q = 0; q < meta.queryBlocks; q++) {
          const row = head * meta.queryBlocks + q;
          let low = edges.start[row];
          const end = edges.start[row + 1];
          let high = end;
          while (low < high) {
            const middle = (low + high) >> 1;
            if (edges.k[middle] < k) low = middle + 1;
            else high = middle;
          }
          if (low < end && edges.k[low] === k) {
            visit(q, edges.value[edges.weight[low]], seen ? 1 - seen[low] / 255 : 0);
          }
        }
      }
    }
  }

  // Edges of one block by the block at their other end, strongest first. A block may have one
  // edge in each head: masses and lengths add up, of scores the best counts.
  function collect(each, selection, block, mask) {
    const ends = new Map();
    each(selection, block, mask, (other, weight, missed) => {
      const entry = ends.get(other);
      if (!entry) ends.set(other, { block: other, weight, missed: weight * missed, all: missed });
      else if (meta.weights !== "score") {
        entry.weight += weight;
        entry.missed += weight * missed;
      } else if (weight > entry.weight) {
        Object.assign(entry, { weight, missed: weight * missed, all: missed });
      }
    });
    const list = [...ends.values()];
    for (const entry of list) {
      entry.share = meta.weights === "score" ? entry.all : entry.missed / (entry.weight || 1);
    }
    return list.sort((a, b) => b.weight - a.weight || a.block - b.block);
  }

  // Sums edges into bins of qStep x kStep blocks. Returns row-major weight and missed weight.
  function bin(selection, view, mask) {
    const rows = Math.ceil((view.q1 - view.q0) / view.qStep);
    const columns = Math.ceil((view.k1 - view.k0) / view.kStep);
    const sum = new Float32Array(rows * columns);
    const missed = mask === null ? null : new Float32Array(rows * columns);
    const add = meta.weights === "score" ? highest : total;
    if (meta.weights === "score") sum.fill(-Infinity);
    const fill = usesGrid(view) ? binGrid : binEdges;
    for (const part of selection) fill(part, view, mask, { sum, missed, columns, add });
    return { sum, missed, rows, columns };
  }

  const total = (array, at, value) => (array[at] += value);
  const highest = (array, at, value) => {
    if (value > array[at]) array[at] = value;
  };

  // The grid holds the sums of all edges of the trace; the page may hold the strongest only.
  function usesGrid(view) {
    return Boolean(
      meta.grid && view.qStep % meta.grid.qStep === 0 && view.kStep % meta.grid.kStep === 0,
    );
  }

  function binEdges({ heads, edges }, view, mask, { sum, missed, columns, add }) {
    const column = new Int32Array(meta.keyBlocks).fill(-1);
    for (let k = view.k0; k < view.k1; k++) column[k] = Math.floor((k - view.k0) / view.kStep);
    const seen = mask === null ? null : edges.seen[mask];
    for (const head of heads) {
      for (let q = view.q0; q < view.q1; q++) {
        const base = Math.floor((q - view.q0) / view.qStep) * columns;
        const row = head * meta.queryBlocks + q;
        for (let edge = edges.start[row]; edge < edges.start[row + 1]; edge++) {
          const at = column[edges.k[edge]];
          if (at < 0) continue;
          const weight = edges.value[edges.weight[edge]];
          add(sum, base + at, weight);
          if (seen) missed[base + at] += weight * (1 - seen[edge] / 255);
        }
      }
    }
  }

  function binGrid({ layer, heads, edges }, view, mask, { sum, missed, columns, add }) {
    const { rows, columns: wide, qStep, kStep } = meta.grid;
    const value = weights(layer, "gridRange");
    const lost = mask === null ? null : edges.grids[1 + mask];
    for (const head of heads) {
      for (let i = Math.floor(view.q0 / qStep); i * qStep < view.q1; i++) {
        const base = Math.floor((i * qStep - view.q0) / view.qStep) * columns;
        for (let j = Math.floor(view.k0 / kStep); j * kStep < view.k1; j++) {
          const cell = (head * rows + i) * wide + j;
          const code = edges.grids[0][cell];
          if (!code) continue;
          const at = base + Math.floor((j * kStep - view.k0) / view.kStep);
          add(sum, at, value[code]);
          if (lost) missed[at] += value[code] * (lost[cell] / 255);
        }
      }
    }
  }

  return { unpack, load, select, eachIn, eachOut, collect, bin, usesGrid };
})();

// The text of the trace, and where its tokens and blocks begin in it.
const text = (() => {
  let whole = "";
  let offsets = null;

  async function load() {
    if (!meta.text) return;
    whole = new TextDecoder().decode(await trace.unpack("text"));
    const lengths = await trace.unpack("lengths");
    offsets = new Uint32Array(meta.tokens + 1);
    let token = 0;
    let length = 0;
    for (const byte of lengths) {
      length += byte;
      if (byte === 255) continue; // longer than a byte says: the next one goes on
      offsets[token + 1] = offsets[token] + length;
      token += 1;
      length = 0;
    }
  }

  const slice = (from, to) => (offsets ? whole.slice(offsets[from], offsets[to]) : "");

  function token(offset) {
    let low = 0;
    let high = meta.tokens;
    while (low + 1 < high) {
      const middle = (low + high) >> 1;
      if (offsets[middle] <= offset) low = middle;
      else high = middle;
    }
    return low;
  }

  // Matches of a phrase, whatever its case and white space: {token, last, from, to}.
  function find(phrase, limit) {
    const words = phrase.trim().split(/\s+/).filter(Boolean);
    if (!words.length || !offsets) return [];
    const escaped = words.map((word) => word.replace(/[.*+?^${}()|[\]\\/-]/g, "\\$&"));
    const matches = [];
    for (const match of whole.matchAll(new RegExp(escaped.join("\\s+"), "gi"))) {
      const to = match.index + match[0].length;
      matches.push({ token: token(match.index), last: token(to - 1), from: match.index, to });
      if (matches.length === limit) break;
    }
    return matches;
  }

  // A match with some words before, so few that the match stays in sight, and after it.
  const around = (from, to) => [
    whole.slice(Math.max(0, from - 14), from).replace(/^\S*\s/, ""),
    whole.slice(from, to),
    whole.slice(to, to + 60),
  ];

  return { load, slice, find, around };
})();

// Tokens of blocks, and blocks of tokens. Key blocks are equally long; query blocks are those of each
// step (a prefill, a chunk, a decode step of one token) one after the other.
const blocks = (() => {
  const first = new Uint32Array(meta.queryBlocks);
  const end = new Uint32Array(meta.queryBlocks);
  const before = new Uint32Array(meta.queryBlocks + 1); // queries in the blocks before
  let q = 0;
  for (const [token, queries, count] of meta.steps) {
    for (let i = 0; i < count; i++, q++) {
      first[q] = token + Math.min(i * meta.queryBlock, queries);
      end[q] = token + Math.min((i + 1) * meta.queryBlock, queries);
      before[q + 1] = before[q] + end[q] - first[q];
    }
  }

  const clamp = (index, count) => Math.max(0, Math.min(count - 1, index));

  // The block that has a token's query, or the last one before it.
  function queryAt(token) {
    let low = 0;
    let high = meta.queryBlocks;
    while (low + 1 < high) {
      const middle = (low + high) >> 1;
      if (first[middle] <= token) low = middle;
      else high = middle;
    }
    return low;
  }

  return {
    clamp,
    queryAt,
    query: (q) => [first[q], end[q]],
    key: (k) => [k * meta.keyBlock, Math.min((k + 1) * meta.keyBlock, meta.tokens)],
    keyAt: (token) => clamp(Math.floor(token / meta.keyBlock), meta.keyBlocks),
    queries: (from, to) => before[to] - before[from],
  };
})();

// How a weight reads: a mass as the share of its queries' attention, others as they are.
const measure = {
  share: meta.weights === "mass",
  logarithmic: meta.weights !== "score",
  // A sum over some query blocks and heads, as the mean of one query (of one block, where the
  // weight is a length); the best of them, where it is a score.
  mean(sum, from, to, heads) {
    if (meta.weights === "score") return sum;
    const count = meta.weights === "mass" ? blocks.queries(from, to) : to - from;
    return sum / Math.max(count * heads, 1);
  },
  format(value) {
    if (!Number.isFinite(value)) return "–";
    return measure.share ? percent(value) : String(Number(value.toPrecision(3)));
  },
};

function percent(share) {
  const value = 100 * share;
  if (value === 0) return "0 %";
  if (value < 0.00995) return "< 0.01 %";
  return `${Number(value.toPrecision(2))} %`;
}

const number = (value) => value.toLocaleString("en");
const heads = (selection) => selection.reduce((sum, part) => sum + part.heads.length, 0);
