// Numbers as people read them, and elements whose content is always text, never markup.

const make = (tag, kind, text) => {
  const node = document.createElement(tag);
  if (kind) node.className = kind;
  if (text !== undefined) node.textContent = text;
  return node;
};
const byId = (id) => document.getElementById(id);
const setText = (node, text) => { if (node.textContent !== text) node.textContent = text; };
const setTitle = (node, text) => { if (node.title !== text) node.title = text; };

/** As many children as wanted: made when missing, removed when too many, so that what stays does not flicker. */
const children = (parent, count, makeOne) => {
  while (parent.children.length > count) parent.lastElementChild.remove();
  while (parent.children.length < count) parent.append(makeOne());
  return [...parent.children];
};

const bytes = (value) => {
  let amount = value;
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (amount < 1024) return `${amount.toFixed(unit === "B" || amount >= 100 ? 0 : 1)} ${unit}`;
    amount /= 1024;
  }
  return `${amount.toFixed(1)} TiB`;
};
const seconds = (value) => {
  if (value < 1e-3) return `${(value * 1e6).toFixed(0)} µs`;
  if (value < 0.1) return `${(value * 1e3).toFixed(1)} ms`;
  if (value < 1) return `${(value * 1e3).toFixed(0)} ms`;
  return `${value < 100 ? value.toFixed(1) : value.toFixed(0)} s`;
};
const ago = (value) => {
  if (value < 60) return `${Math.max(0, Math.round(value))} s ago`;
  if (value < 3600) return `${Math.floor(value / 60)} min ago`;
  return `${Math.floor(value / 3600)} h ago`;
};
const count = (value) => value.toLocaleString("en-US");
const percent = (value) => `${Math.round(value * 100)} %`;
const rate = (value) => (value < 10 ? value.toFixed(1) : count(Math.round(value)));

/** What was counted between two histograms: [upper bounds, counts, sum]. */
const difference = (newer, older) => [newer[0], newer[1].map((value, at) => value - older[1][at]), newer[2] - older[2]];
const total = (histogram) => histogram[1].reduce((sum, value) => sum + value, 0);

/** The value below which a share of all lies, by a straight line inside its bucket; null if there is none. */
const percentile = (histogram, share) => {
  const wanted = total(histogram) * share;
  if (!wanted) return null;
  let below = 0;
  for (let at = 0; at < histogram[0].length; at += 1) {
    const inside = histogram[1][at];
    if (below + inside >= wanted) {
      const from = at ? histogram[0][at - 1] : 0;
      return from + (histogram[0][at] - from) * ((wanted - below) / inside);
    }
    below += inside;
  }
  return histogram[0].at(-1);
};
