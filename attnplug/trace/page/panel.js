// The panel of the selected block pair: both texts, where the query block attends to, and who attends
// to the key block; and the list of matches of a search.
"use strict";

const panel = (() => {
  const LISTED = 100;

  function make(tag, properties = {}, ...children) {
    const element = Object.assign(document.createElement(tag), properties);
    element.append(...children.filter((child) => child !== null));
    return element;
  }

  const range = ([first, end]) =>
    end - first <= 1 ? `token ${number(first)}` : `tokens ${number(first)}–${number(end - 1)}`;

  // The text of a block, token by token; those of the match stand out.
  function body([first, end], hit) {
    if (!meta.text) return make("p", { className: "note" }, "The trace has no text.");
    const element = make("p", { className: "tokens" });
    for (let token = first; token < end; token++) {
      const inside = hit && token >= hit.token && token <= hit.last;
      const piece = make(inside ? "mark" : "span", { title: `token ${number(token)}` });
      piece.append(text.slice(token, token + 1));
      element.append(piece);
    }
    return element;
  }

  function card(title, tokens, hit, action) {
    const heading = make("h2", {}, title, make("small", {}, range(tokens)));
    return make("article", { className: "card" }, make("div", { className: "bar" }, heading, action), body(tokens, hit));
  }

  function snippet([first, end], most = 90) {
    const words = text.slice(first, end).replace(/\s+/g, " ").trim();
    return words.length > most ? `${words.slice(0, most)}…` : words;
  }

  // One edge: its bar, its value, the block at the other end and how that begins.
  function edge(entry, tokens, value, most, current, onClick, lost) {
    const label = `block ${number(entry.block)}, ${range(tokens)}`;
    const fill = make("span", { className: lost ? "fill lost" : "fill" });
    fill.style.inlineSize = `${Math.max(2, (100 * value) / most)}%`;
    const button = make(
      "button",
      { type: "button", onclick: onClick, title: label },
      make("span", { className: "meter" }, fill),
      make("span", { className: "value" }, measure.format(value)),
      make("span", { className: "where" }, number(entry.block)),
      lost ? make("span", { className: "lost-tag" }, "missed") : null,
      make("span", { className: "snippet" }, snippet(tokens)),
    );
    button.dataset.block = entry.block;
    if (current) button.setAttribute("aria-current", "true");
    return make("li", {}, button);
  }

  function list(id, entries, render) {
    document.getElementById(id).replaceChildren(...entries.slice(0, LISTED).map(render));
  }

  function note(id, entries, kind) {
    const shown = entries.length > LISTED ? `the heaviest ${LISTED} of ` : "";
    const partly = app.complete ? "" : ` of those in the page`;
    const what = entries.length === 1 ? kind : `${kind}s`;
    document.getElementById(id).textContent =
      `${shown}${number(entries.length)} ${what}${partly}, heaviest first`;
  }

  function show({ selection, q, k, mask, hit, onSelect }) {
    const [queries, keys] = [blocks.query(q), blocks.key(k)];
    const same = queries[0] >= keys[0] && queries[1] <= keys[1];
    const count = heads(selection);
    const out = trace.collect(trace.eachOut, selection, q, mask);
    const into = trace.collect(trace.eachIn, selection, k, mask);
    const both = (label, tokens) =>
      make("button", {
        type: "button",
        onclick: () => onSelect(blocks.queryAt(tokens[0]), blocks.keyAt(tokens[0])),
        title: "Select this block as query and as key",
      }, label);
    const cards = document.getElementById("cards");
    const link = pairLine(out, q, k, count);
    if (same) cards.replaceChildren(card(`Block ${number(k)}`, keys, hit, null), link);
    else {
      cards.replaceChildren(
        card(`Query block ${number(q)}`, queries, hit, both("Both ways", queries)),
        link,
        card(`Key block ${number(k)}`, keys, hit, both("Both ways", keys)),
      );
    }
    const outTitle = document.getElementById("out-title");
    outTitle.textContent = `Query block ${number(q)} attends to`;
    document.getElementById("in-title").textContent = `Key block ${number(k)} is attended by`;
    note("out-note", out, "block");
    note("in-note", into, "block");
    const mean = (entry, row) => measure.mean(entry.weight, row, row + 1, count);
    // A decode step's block is one query: the lists go by what they show, the mean of a query.
    into.sort((a, b) => mean(b, b.block) - mean(a, a.block) || a.block - b.block);
    const top = (entries, row) =>
      Math.max(...entries.slice(0, LISTED).map((entry) => mean(entry, row ?? entry.block)), 1e-30);
    const [mostOut, mostIn] = [top(out, q), top(into, null)];
    list("out", out, (entry) =>
      edge(entry, blocks.key(entry.block), mean(entry, q), mostOut, entry.block === k,
        () => onSelect(q, entry.block), entry.share > 0.5));
    list("in", into, (entry) =>
      edge(entry, blocks.query(entry.block), mean(entry, entry.block), mostIn, entry.block === q,
        () => onSelect(entry.block, k), entry.share > 0.5));
  }

  // What the selected pair itself weighs.
  function pairLine(out, q, k, count) {
    const rank = out.findIndex((entry) => entry.block === k);
    const line = make("p", { className: "pair", id: "pair" });
    if (rank < 0) {
      line.append(app.complete ? "No edge between them in the trace." : "No edge between them in the page.");
      return line;
    }
    const value = measure.mean(out[rank].weight, q, q + 1, count);
    line.append(
      make("strong", {}, measure.format(value)),
      measure.share ? " of the query block's attention" : ` ${meta.weights}`,
      `, edge ${rank + 1} of ${out.length}`,
      out[rank].share > 0.5 ? make("span", { className: "lost-tag" }, "missed") : "",
    );
    return line;
  }

  function results(matches, current, onPick) {
    const shown = matches.slice(0, LISTED);
    document.getElementById("results").replaceChildren(
      ...shown.map((hit, index) => {
        const [before, match, after] = text.around(hit.from, hit.to);
        const button = make(
          "button",
          { type: "button", onclick: () => onPick(index), title: `token ${number(hit.token)}` },
          make("span", { className: "where" }, `block ${number(blocks.keyAt(hit.token))}`),
          make("span", { className: "snippet" }, before, make("mark", {}, match), after),
        );
        if (index === current) button.setAttribute("aria-current", "true");
        return make("li", {}, button);
      }),
    );
  }

  return { show, results, range, snippet, make };
})();
