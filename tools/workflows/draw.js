// Runs in the page of ComfyUI's front end, with a sheet as its argument: an empty graph becomes the workflow.
// Gaps leave room for the front end's other design (Nodes 2.0), whose nodes are taller.
// Returns, as JSON, what the front end itself saves (workflow) and sends to the server (prompt).
const sheet = arguments[0];
// Those between groups are small: a template is fitted into three quarters of the window, and below a zoom of 0.57 the
// front end draws no text.
const COLUMN_GAP = 24, ROW_GAP = 24, GROUP_GAP = 15, PADDING = 12, TITLE = LiteGraph.NODE_TITLE_HEIGHT;
const GROUP_TITLE = 45;
// Room for what a node of ours writes on itself after a run: two lines, or less, or more.
const STATUS = 50, STATUS_OF = {Pascal8Bit: 70}, OF_SEVERAL_PARTS = 100;
const WIDGET_MORE = 14;  // what a widget is taller in the other design
const BYPASSED = 4;  // the front end's number for it
const PASCAL = {color: "#2a363b", bgcolor: "#3f5159"};  // as the front end's own "pale blue"

const graph = app.graph;
app.clean();
graph.clear();
const nodes = {};

function setWidget(node, name, value) {
  const widget = node.widgets?.find(w => w.name === name) ?? (node.type === "MarkdownNote" ? node.widgets[0] : null);
  if (!widget) throw new Error(`${node.type} has no widget ${name}`);
  if (Array.isArray(widget.options?.values) && !widget.options.values.includes(value))
    throw new Error(`${node.type}.${name} does not offer ${value}`);
  widget.value = value;
}

for (const entry of sheet.nodes) {
  const node = LiteGraph.createNode(entry.type);
  if (!node) throw new Error(`no node ${entry.type}`);
  graph.add(node);
  nodes[entry.key] = node;
  if (entry.title) node.title = entry.title;
  if (entry.bypassed) node.mode = BYPASSED;
  if (entry.models.length) node.properties.models = entry.models;
  for (const [name, value] of Object.entries(entry.widgets)) setWidget(node, name, value);
  const seed = node.widgets?.find(w => w.name === "control_after_generate");
  if (seed) seed.value = "fixed";  // so that a second run, with a node bypassed, can be compared
  if (entry.type.startsWith("Pascal")) Object.assign(node, PASCAL);
  if (entry.type === "MarkdownNote") Object.assign(node, {color: "#432", bgcolor: "#000"});
}

for (const entry of sheet.nodes)
  for (const [name, [from, slot]] of Object.entries(entry.links)) {
    const input = nodes[entry.key].inputs.findIndex(i => i.name === name);
    if (input < 0) throw new Error(`${entry.type} has no input ${name}`);
    if (!nodes[from].connect(slot, nodes[entry.key], input)) throw new Error(`${from}.${slot} does not fit ${name}`);
  }

function columnWidth(keys) {
  const sizes = keys.map(key => [sheet.nodes.find(entry => entry.key === key).size[0], nodes[key].computeSize()[0]]);
  return Math.ceil(Math.max(270, ...sizes.flat()));
}

// The other design folds what only experts set on our nodes; on ComfyUI's own, older versions show all of it.
function shown(node) {
  const isOurs = node.type.startsWith("Pascal");
  return (node.widgets ?? []).filter(w => !(isOurs && (w.advanced || w.options?.advanced)));
}

function statusHeight(node) {
  if (!node.type.startsWith("Pascal")) return 0;
  const parts = node.inputs.filter(i => ["MODEL", "CLIP", "VAE"].includes(i.type) && i.link != null);
  return node.type === "PascalAttentionPatch" && parts.length > 1 ? OF_SEVERAL_PARTS : STATUS_OF[node.type] ?? STATUS;
}

// Nodes of one width, top to bottom; returns where they end.
function placeColumn(keys, width, x, y) {
  let bottom = y;
  for (const key of keys) {
    const node = nodes[key], wanted = sheet.nodes.find(entry => entry.key === key).size[1];
    node.setSize([width, Math.ceil(Math.max(wanted, node.computeSize()[1] + statusHeight(node)))]);
    node.pos = [x, y + TITLE];
    bottom = y + TITLE + node.size[1];
    y = bottom + ROW_GAP + WIDGET_MORE * shown(node).length;
  }
  return bottom;
}

// One frame with its columns; the last column takes what is left of the width. Returns where the frame ends.
function placeGroup(group, left, top, width) {
  let x = left + PADDING, bottom = 0;
  group.columns.forEach((keys, i) => {
    const last = i === group.columns.length - 1;
    const columnWide = last ? left + width - PADDING - x : columnWidth(keys);
    bottom = Math.max(bottom, placeColumn(keys, columnWide, x, top + GROUP_TITLE));
    x += columnWide + COLUMN_GAP;
  });
  if (!group.title) return bottom;
  const frame = new LiteGraph.LGraphGroup(group.title);
  frame.color = group.colour;
  graph.add(frame);
  frame.pos = [left, top];
  frame.size = [width, bottom + PADDING - top];
  return bottom + PADDING;
}

function groupWidth(group) {
  const columns = group.columns.map(columnWidth).reduce((sum, width) => sum + width + COLUMN_GAP, -COLUMN_GAP);
  return columns + 2 * PADDING;
}

let left = 0;
for (const stack of sheet.stacks) {
  const width = Math.max(...stack.map(groupWidth));
  let top = 0;
  for (const group of stack) top = placeGroup(group, left, top, width) + GROUP_GAP;
  left += width + GROUP_GAP;
}

// The front end also sends the widgets that only it has, such as what a preview shows.
function onlyInputs(prompt) {
  for (const node of Object.values(prompt)) {
    const {required, optional} = LiteGraph.registered_node_types[node.class_type].nodeData.input;
    const of = name => name.split('.')[0];  // "format.codec" belongs to the choice in "format"
    const known = name => of(name) in (required ?? {}) || of(name) in (optional ?? {});
    node.inputs = Object.fromEntries(Object.entries(node.inputs).filter(([name]) => known(name)));
  }
  return prompt;
}

return app.graphToPrompt().then(({workflow, output}) => JSON.stringify({workflow, prompt: onlyInputs(output)}));
