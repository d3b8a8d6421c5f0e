// What a reader cannot read: measured in the page itself, and sent to the page around it.
addEventListener("load", async () => {
  document.querySelectorAll("details:not([data-closed])").forEach(one => { one.open = true; });

  const clipped = (element, box) => {
    // What a table that scrolls shows of it.
    let [left, top, right, bottom] = [box.left, box.top, box.right, box.bottom];
    for (let at = element; at; at = at.parentElement) {
      if (getComputedStyle(at).overflowX !== "visible" && at !== document.documentElement) {
        const frame = at.getBoundingClientRect();
        [left, right] = [Math.max(left, frame.left), Math.min(right, frame.right)];
        [top, bottom] = [Math.max(top, frame.top), Math.min(bottom, frame.bottom)];
      }
    }
    return right - left > 0 && bottom - top > 0 ? { left, top, right, bottom } : null;
  };

  const numbers = colour => colour.match(/[\d.]+/g).map(Number);
  const luminance = ([r, g, b]) => {
    const linear = [r, g, b].map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
  };
  const behind = element => {
    for (let at = element; at; at = at.parentElement) {
      const colour = numbers(getComputedStyle(at).backgroundColor);
      if (colour.length < 4 || colour[3] > 0) return colour;
    }
    return [255, 255, 255];
  };
  const contrast = (element, colour) => {
    const [low, high] = [luminance(numbers(colour)), luminance(behind(element))].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  };

  const texts = [];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walk.nextNode(); node; node = walk.nextNode()) {
    const words = node.data.trim().replace(/\s+/g, " "), element = node.parentElement;
    if (!words || element.closest("script, style, .hidden") || !element.checkVisibility()) continue;
    const style = getComputedStyle(element), drawn = element.closest("svg text");
    const scale = drawn ? Math.hypot(drawn.getScreenCTM().a, drawn.getScreenCTM().b) : 1;
    const range = document.createRange();
    range.selectNodeContents(node);
    const boxes = drawn ? [drawn.getBoundingClientRect()] : [...range.getClientRects()];
    texts.push({
      words, size: parseFloat(style.fontSize) * scale, ratio: contrast(element, drawn ? style.fill : style.color),
      boxes: boxes.map(box => clipped(element, box)).filter(Boolean),
    });
  }
  const least = what => {
    const first = texts.reduce((a, b) => b[what] < a[what] ? b : a);
    return [Math.round(first[what] * 100) / 100, first.words];
  };

  const overlaps = [];
  const all = texts.flatMap((text, i) => text.boxes.map(box => ({ ...box, i }))).sort((a, b) => a.top - b.top);
  all.forEach((one, at) => {
    for (let next = at + 1; next < all.length && all[next].top < one.bottom - 2; next++) {
      const other = all[next];
      const wide = Math.min(one.right, other.right) - Math.max(one.left, other.left);
      const high = Math.min(one.bottom, other.bottom) - Math.max(one.top, other.top);
      if (one.i !== other.i && wide > 2 && high > 2) overlaps.push([texts[one.i].words, texts[other.i].words].sort());
    }
  });

  const figures = [...document.querySelectorAll("figure svg")];
  const faults = !globalThis.axe ? null : (await axe.run(document, { resultTypes: ["violations"] })).violations;
  parent.postMessage(JSON.stringify({
    width: innerWidth,
    dark: matchMedia("(prefers-color-scheme: dark)").matches,
    overflow: document.documentElement.scrollWidth - innerWidth,
    texts: texts.length,
    smallest: least("size"),
    faintest: least("ratio"),
    overlaps: overlaps.slice(0, 20),
    figures: figures.map(svg => {
      const box = svg.getBoundingClientRect();
      const spill = [...svg.querySelectorAll("text")].map(text => {
        const at = text.getBoundingClientRect();
        return Math.max(box.left - at.left, at.right - box.right, box.top - at.top, at.bottom - box.bottom);
      });
      return [svg.getAttribute("aria-label").slice(0, 60), box.left, box.right, Math.max(...spill)];
    }),
    axe: faults && faults.map(one => `${one.id}: ${one.nodes.map(node => node.target.join(" ")).slice(0, 3).join(", ")}`),
  }), "*");
});
