// Draws what was drafted in a pass of the target, and what of it was accepted.

const SVG = "http://www.w3.org/2000/svg";
const CHARACTER = 7.6; // width of a character of the label's font
const ROW = 34;
const HEIGHT = 25;
const GAP = 34;
const TOP = 22;
const MAX_LABEL = 14;

/** A token's text with its spaces and line ends visible, cut to a label's length. */
export function visible(text, limit = MAX_LABEL) {
  const shown = text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "·");
  const characters = [...shown];
  return characters.length > limit ? characters.slice(0, limit - 1).join("") + "…" : shown || "∅";
}

/**
 * The nodes of a pass with their places: the token before it as the root, the drafted ones, and the one that the target
 * added.
 *
 * @param {{before: string, drafted: {text: string, parent: number}[], accepted: number[], added: string | null}} pass
 */
export function layOut(pass) {
  const nodes = [{ text: pass.before, kind: "root", parent: null, children: [], depth: 0 }];
  const accepted = new Set(pass.accepted);
  pass.drafted.forEach((node, index) => {
    nodes.push({
      text: node.text,
      kind: accepted.has(index) ? "accepted" : "rejected",
      parent: node.parent + 1,
      children: [],
    });
  });
  if (pass.added !== null) {
    const last = pass.accepted.length ? pass.accepted[pass.accepted.length - 1] + 1 : 0;
    nodes.push({ text: pass.added, kind: "added", parent: last, children: [] });
  }
  for (const node of nodes.slice(1)) {
    node.depth = nodes[node.parent].depth + 1;
    nodes[node.parent].children.push(node);
  }
  // The path that was taken lies on top and is straight.
  for (const node of nodes) node.children.sort((a, b) => (a.kind === "rejected") - (b.kind === "rejected"));
  let row = 0;
  const place = (node) => {
    node.row = node.children.length ? Math.min(...node.children.map(place)) : row++;
    return node.row;
  };
  place(nodes[0]);

  const widths = [];
  for (const node of nodes) {
    node.label = visible(node.text);
    node.mark = { accepted: "✓", added: "+" }[node.kind] ?? "";
    node.width = [...node.label].length * CHARACTER + 16 + (node.mark ? 15 : 0);
    widths[node.depth] = Math.max(widths[node.depth] ?? 0, node.width);
  }
  const lefts = widths.map((_, depth) => widths.slice(0, depth).reduce((sum, width) => sum + width + GAP, 2));
  for (const node of nodes) {
    node.x = lefts[node.depth];
    node.y = TOP + node.row * ROW;
  }
  return { nodes, lefts, width: lefts.at(-1) + widths.at(-1) + 4, height: TOP + row * ROW };
}

/** The pass as a sentence. */
export function describe(pass) {
  const quote = (text) => `“${visible(text, 24)}”`;
  const added = pass.added === null ? "" : `the model added ${quote(pass.added)}`;
  if (!pass.drafted.length) return `Nothing was drafted; ${added || "no token came of it"}.`;
  const taken = pass.accepted.map((index) => quote(pass.drafted[index].text));
  const drafted = `${pass.drafted.length} drafted`;
  const kept = taken.length ? `${taken.length} accepted (${taken.join(" ")})` : "none accepted";
  return `${drafted}, ${kept}${added ? `; ${added}` : ""}.`;
}

/** Draws a pass into an element. */
export function draw(element, pass) {
  const { nodes, lefts, width, height } = layOut(pass);
  const svg = create("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img" });
  svg.setAttribute("aria-label", describe(pass));
  lefts.forEach((left, depth) => {
    const label = depth ? (depth === 1 ? "depth 1" : depth) : "so far";
    svg.append(create("text", { x: left + 2, y: 11, class: "depth" }, label));
  });
  for (const node of nodes.slice(1)) {
    const from = nodes[node.parent];
    const [x1, y1, x2, y2] = [from.x + from.width, from.y + HEIGHT / 2, node.x, node.y + HEIGHT / 2];
    const bend = Math.max(10, (x2 - x1) / 2);
    svg.append(create("path", { class: node.kind, d: `M${x1} ${y1}C${x1 + bend} ${y1} ${x2 - bend} ${y2} ${x2} ${y2}` }));
  }
  for (const node of nodes) {
    const group = create("g", { class: node.kind });
    group.append(create("rect", { x: node.x, y: node.y, width: node.width, height: HEIGHT, rx: 6 }));
    if (node.mark) group.append(create("text", { x: node.x + 8, y: node.y + 17, class: "mark" }, node.mark));
    group.append(create("text", { x: node.x + (node.mark ? 23 : 8), y: node.y + 17 }, node.label));
    group.append(create("title", {}, node.text));
    svg.append(group);
  }
  element.replaceChildren(svg);
}

function create(name, attributes, text) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  return element;
}
