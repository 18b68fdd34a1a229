// Colours of both themes. One hue from low to high for weights, another for what a mask misses: told
// apart by those who see no red or green, and by lightness alone.
"use strict";

const colors = (() => {
  const scale = (list) => list.map((color, i) => [i / (list.length - 1), color]);
  const themes = {
    light: {
      weight: scale(["#e4eef8", "#b3d3ec", "#6cabd9", "#2a77b8", "#0c4488", "#06214c"]),
      missed: scale(["#fdebd8", "#fbc38d", "#f2893a", "#cc5a0b", "#8a3504", "#521d02"]),
      ink: "#1b2430",
      soft: "#5a6675",
      grid: "#e3e7ec",
      plot: "#ffffff",
      mark: "#b0005e",
      hit: "#0a7a3c",
    },
    dark: {
      weight: scale(["#14273d", "#1d4468", "#2a6da3", "#4d9bd6", "#97cbf1", "#f0f8ff"]),
      missed: scale(["#38210f", "#6b3610", "#a9530f", "#e87f1c", "#ffb566", "#fff0de"]),
      ink: "#e6ebf2",
      soft: "#9fabbb",
      grid: "#263140",
      plot: "#0e141c",
      mark: "#ff7ac0",
      hit: "#5fdc92",
    },
  };
  const wished = matchMedia("(prefers-color-scheme: dark)");
  let chosen = null;
  const listeners = [];

  const theme = () => chosen ?? (wished.matches ? "dark" : "light");

  function apply() {
    document.documentElement.dataset.theme = theme();
    for (const listener of listeners) listener();
  }

  wished.addEventListener("change", apply);

  return {
    theme,
    now: () => themes[theme()],
    onChange: (listener) => listeners.push(listener),
    toggle() {
      chosen = theme() === "dark" ? "light" : "dark";
      apply();
    },
    apply,
  };
})();
