"use strict";
const trace = JSON.parse(document.getElementById("trace").textContent);
const KINDS = JSON.parse(document.getElementById("kinds").textContent);
const FEW = 200; // rows of a table before "show all"

function size(bytes) {
  for (const unit of ["B", "kB", "MB"]) {
    if (bytes < 1000) return `${bytes.toFixed(unit === "B" ? 0 : 1)} ${unit}`;
    bytes /= 1000;
  }
  return `${bytes.toFixed(1)} GB`;
}

function element(name, properties, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

/* A table whose columns sort. A column: name, of (row -> what sorts), number, says (row -> what is shown). */
class Table {
  constructor(place, caption, columns, sorted, descending) {
    Object.assign(this, { columns, sorted, descending, rows: [], all: false });
    this.heads = columns.map((column, i) => {
      const button = element("button", { type: "button", textContent: column.name });
      button.addEventListener("click", () => this.sort(i));
      return element("th", { scope: "col", className: column.number ? "number" : "" }, button);
    });
    this.body = element("tbody");
    this.more = element("button", { type: "button" });
    this.more.addEventListener("click", () => { this.all = true; this.draw(); });
    const label = element("caption", { className: "note", textContent: caption });
    const table = element("table", {}, label, element("thead", {}, element("tr", {}, ...this.heads)), this.body);
    const scroll = element("div", { className: "scroll", tabIndex: 0 }, table);
    scroll.setAttribute("role", "region");
    scroll.setAttribute("aria-label", caption);
    place.append(scroll, element("div", { className: "controls" }, this.more));
  }

  sort(i) {
    this.descending = i === this.sorted ? !this.descending : Boolean(this.columns[i].number);
    this.sorted = i;
    this.draw();
  }

  show(rows) {
    this.rows = rows;
    this.draw();
  }

  draw() {
    const { of } = this.columns[this.sorted];
    const order = (a, b) => (of(a) < of(b) ? -1 : of(a) > of(b) ? 1 : 0);
    const sorted = [...this.rows].sort((a, b) => (this.descending ? order(b, a) : order(a, b)));
    this.heads.forEach((head, i) => {
      head.setAttribute("aria-sort", i !== this.sorted ? "none" : this.descending ? "descending" : "ascending");
    });
    const shown = this.all ? sorted : sorted.slice(0, FEW);
    this.body.replaceChildren(...shown.map((row) => element("tr", {}, ...this.columns.map((column) => {
      const says = column.says ? column.says(row) : String(column.of(row));
      return element("td", { className: column.number ? "number" : "", textContent: says });
    }))));
    this.more.hidden = shown.length === sorted.length;
    this.more.textContent = `Show all ${sorted.length}`;
  }
}

/* Buttons of which one is pressed. */
function choice(place, options, chosen) {
  const buttons = options.map(([value, text]) => {
    const button = element("button", { type: "button", textContent: text });
    button.addEventListener("click", () => { press(button); chosen(value); });
    return button;
  });
  const press = (one) => buttons.forEach((button) => button.setAttribute("aria-pressed", String(button === one)));
  press(buttons[0]);
  place.append(...buttons);
}

function sum(rows, of) {
  return rows.reduce((total, row) => total + of(row), 0);
}

function grouped(rows, key) {
  const groups = new Map();
  for (const row of rows) {
    const name = JSON.stringify(key(row));
    if (!groups.has(name)) groups.set(name, []);
    groups.get(name).push(row);
  }
  return [...groups.values()];
}

function collectives() {
  const place = document.getElementById("collectives");
  const controls = element("div", { className: "controls" });
  place.append(controls);
  const table = new Table(place, "Collectives of one step, sent by rank 1", [
    { name: "layer", of: (row) => row.layer },
    { name: "region", of: (row) => row.region },
    { name: "way", of: (row) => row.way },
    { name: "verb", of: (row) => row.verb },
    { name: "count", of: (row) => row.count, number: true },
    { name: "bytes sent", of: (row) => row.sent, says: (row) => size(row.sent), number: true },
  ], 5, true);
  const show = (byLayer) => table.show(
    grouped(trace.messages, (m) => [byLayer ? m.layer : m.layer !== "", m.kind, m.way, m.verb]).map((group) => ({
      layer: !group[0].layer ? "outside the layers" : byLayer ? group[0].layer : "all layers",
      region: KINDS[group[0].kind],
      way: group[0].way,
      verb: group[0].verb.replaceAll("_", "-"),
      count: group.length,
      sent: sum(group, (message) => message.sent),
    })));
  choice(controls, [[false, "all layers together"], [true, "each layer"]], show);
  show(false);
}

function kept() {
  const place = document.getElementById("kept");
  const input = element("input", { type: "search", placeholder: "module, operation, shape, dtype" });
  input.setAttribute("aria-label", "Filter the saved tensors");
  const found = element("output");
  const controls = element("div", { className: "controls" }, input);
  place.append(controls);
  const table = new Table(place, "Tensors that autograd keeps for backward on rank 1", [
    { name: "module", of: (row) => row.module || "(the model)" },
    { name: "region", of: (row) => KINDS[row.kind] },
    { name: "kept by", of: (row) => row.by },
    { name: "shape", of: (row) => row.shape.reduce((a, b) => a * b, 1), says: (row) => row.shape.join(" x ") },
    { name: "dtype", of: (row) => row.dtype },
    { name: "bytes", of: (row) => row.bytes, says: (row) => size(row.bytes), number: true },
  ], 5, true);
  let kind = "";
  const show = () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    const rows = trace.kept.filter((row) => {
      const text = `${row.module} ${row.by} ${row.shape.join("x")} ${row.dtype}`.toLowerCase();
      return (!kind || row.kind === kind) && words.every((word) => text.includes(word));
    });
    found.textContent = `${rows.length} of ${trace.kept.length} tensors, ${size(sum(rows, (row) => row.bytes))}`;
    table.show(rows);
  };
  const kinds = [...new Set(trace.kept.map((row) => row.kind))];
  choice(controls, [["", "all"], ...kinds.map((name) => [name, KINDS[name]])], (value) => { kind = value; show(); });
  controls.append(found);
  input.addEventListener("input", show);
  show();
}

collectives();
kept();
