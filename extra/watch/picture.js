"use strict";
// The panels: what is in the memory of every rank. `build` makes the shapes once, `draw` sets them to a state.

const SVG = "http://www.w3.org/2000/svg";
function shape(parent, name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  parent.appendChild(made);
  return made;
}

const KINDS = ["parameters", "gradients", "optimizer"];

const narrow = matchMedia("(max-width: 640px)");  // one panel in a line

class Picture {
  constructor(svg, rec) {
    this.svg = svg;
    this.rec = rec;
    svg.replaceChildren();
    const n = rec.ranks;
    // Sizes: cells get narrower with more ranks, there are two or four panels in a line.
    this.cell = n <= 2 ? 46 : n <= 4 ? 25 : n <= 8 ? 13 : 8;
    this.dot = Math.min(11, this.cell - 3);
    this.rowHeight = 25;
    this.label = 26 + 7.6 * Math.max(4, ...rec.rows.map((row) => row.name.length));
    this.gap = 22;
    this.column = n * this.cell + this.gap;
    this.width = this.label + 3 * this.column;
    this.height = 62 + rec.rows.length * this.rowHeight + 8;
    this.perLine = n <= 1 || narrow.matches ? 1 : n <= 4 ? 2 : 4;
    this.space = 44;
    const lines = Math.ceil(n / this.perLine), perLine = Math.min(n, this.perLine);
    const width = perLine * this.width + (perLine - 1) * this.space;
    const height = lines * this.height + (lines - 1) * 26;
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.style.maxWidth = `${Math.round(width * 1.5)}px`;
    this.panels = [];
    for (let rank = 0; rank < n; rank++) this.panels.push(this.panel(rank));
    this.flights = shape(svg, "g", { class: "flights", "aria-hidden": "true" });
  }

  corner(rank) {
    return [(rank % this.perLine) * (this.width + this.space), Math.floor(rank / this.perLine) * (this.height + 26)];
  }

  // Upper left of a cell.
  place(rank, row, column, cell) {
    const [x, y] = this.corner(rank);
    return [x + this.label + column * this.column + cell * this.cell, y + 62 + row * this.rowHeight];
  }

  panel(rank) {
    const { rec } = this, n = rec.ranks, [x, y] = this.corner(rank);
    const group = shape(this.svg, "g", { class: "panel" });
    shape(group, "rect", { class: "paper", x, y, width: this.width, height: this.height, rx: 8 });
    shape(group, "text", { class: "name", x: x + 12, y: y + 22 }, `rank ${rank}`);
    const doing = shape(group, "text", { class: "doing", x: x + this.width - 12, y: y + 22, "text-anchor": "end" });
    COLUMNS.forEach((name, column) => {
      const short = n * this.cell < 84 ? ["params", "grads", "optim."][column] : name;
      shape(group, "text", { class: "column", x: x + this.label + column * this.column + (n * this.cell) / 2, y: y + 48,
        "text-anchor": "middle" }, short);
    });
    const rows = rec.rows.map((row, r) => {
      const top = y + 62 + r * this.rowHeight;
      const tint = shape(group, "rect", { class: "tint", x: x + 4, y: top - 4, width: this.width - 8, height: this.rowHeight - 1, rx: 4 });
      shape(tint, "title", {}, `${row.name}: ${row.parameters}`);
      shape(group, "text", { class: "row", x: x + 12, y: top + 12 }, row.name);
      const columns = COLUMNS.map((_, column) => {
        const cells = [];
        for (let cell = 0; cell < n; cell++) cells.push(this.makeCell(group, rank, r, column, cell));
        const [left, up] = this.place(rank, r, column, n);
        const copies = shape(group, "text", { class: "copies", x: left, y: up + 12 });
        return { cells, copies };
      });
      return { tint, columns };
    });
    return { group, doing, rows };
  }

  makeCell(group, rank, row, column, cell) {
    const [x, y] = this.place(rank, row, column, cell), kind = KINDS[column];
    const width = this.cell - 2, height = 16;
    const made = { width };
    made.frame = shape(group, "rect", { class: "frame", x, y, width, height });
    made.whole = shape(group, "rect", { class: `whole ${kind}`, x, y, width: 0, height });
    made.moving = shape(group, "rect", { class: "moving", x, y, width, height });
    const inset = width > 14 ? 3 : 2;
    made.heldWidth = width - 2 * inset;
    made.held = shape(group, "rect", { class: `held ${kind}`, x: x + inset, y: y + 3, width: 0, height: height - 6 });
    if (cell === rank && this.rec.shards) shape(group, "line", { class: "own", x1: x, x2: x + width, y1: y + height + 2, y2: y + height + 2 });
    return made;
  }

  draw(state) {
    const { rec } = this;
    this.state = state;
    this.panels.forEach((panel, rank) => {
      const me = state.ranks[rank];
      const waits = me.waitsFor !== null;
      panel.group.classList.toggle("idle", waits);
      panel.doing.textContent = this.doing(me, state);
      panel.doing.classList.toggle("waits", waits);
      const tinted = me.unit ? rec.units[me.unit] || [] : [];
      panel.rows.forEach((row, r) => {
        row.tint.classList.toggle("on", tinted.includes(r) || (me.step.startsWith("4") && !me.over));
        row.columns.forEach(({ cells, copies }, column) => {
          const way = underWay(rec, state, rank, r, column), capacity = rec.rows[r].cells[column];
          let most = 0;
          cells.forEach((shapes, cell) => {
            const fill = (layer) => (capacity ? me.cells[r][column][layer][cell] / capacity : 0);
            const whole = fill(WHOLE), held = fill(HELD);
            most = Math.max(most, whole, held);
            shapes.whole.setAttribute("width", Math.min(1, whole) * shapes.width);
            shapes.held.setAttribute("width", Math.min(1, held) * shapes.heldWidth);
            // The own cell of an all-gather is there; what comes from the others is on its way.
            const here = column === 0 && cell === rank;
            shapes.moving.setAttribute("class", `moving ${here || !(whole || held) ? "" : way}`);
            shapes.frame.classList.toggle("none", !capacity);
          });
          copies.textContent = most > 1.05 ? `×${Math.round(most * 10) / 10}` : "";
        });
      });
    });
    this.fly(0.5);
  }

  doing(me, state) {
    const { rec } = this;
    if (me.waitsFor !== null) {
      const { kind, row } = rec.collectives[me.waitsFor], { missing } = state.collectives[me.waitsFor];
      if (rec.ranks > 4) return `waits: ${kind}`;  // there is no room for more
      return `waits for ${missing.length ? names(missing) : `the ${kind} of ${rowName(rec, row)}`}`;
    }
    if (me.unit) return `${me.phase}: ${me.unit}`;
    return me.failed ? "stopped" : me.over ? "has finished" : me.step ? `step ${me.step}` : "";
  }

  // What flies now: [from, to] in the picture, of every collective that is moving.
  paths() {
    const { rec, state } = this, found = [], n = rec.ranks;
    rec.collectives.forEach(({ kind, row }, number) => {
      const { status, missing } = state.collectives[number];
      if (row < 0 || missing.length || !status.includes("moving")) return;
      for (let from = 0; from < n; from++) {
        for (let to = 0; to < n; to++) {
          if (from === to || status[to] === "ended") continue;
          if (kind === "all-gather") found.push([this.place(from, row, 0, from), this.place(to, row, 0, from), "parameters"]);
          else if (kind === "broadcast") found.push([this.place(0, row, 0, to), this.place(to, row, 0, to), "parameters"]);
          else found.push([this.place(from, row, 1, to), this.place(to, row, 1, to), "gradients"]);
        }
      }
    });
    return found;
  }

  // Draw what flies at a part of its way, 0 to 1. An arc, so that flights in both directions do not hide each other.
  fly(part) {
    const paths = this.paths(), eased = part * part * (3 - 2 * part), dots = this.flights.children;
    while (dots.length < paths.length) shape(this.flights, "rect", { width: this.dot, height: this.dot, rx: 2 });
    paths.forEach(([[x0, y0], [x1, y1], kind], i) => {
      const bend = Math.min(60, 14 + Math.hypot(x1 - x0, y1 - y0) / 9) * (x1 > x0 || (x1 === x0 && y1 > y0) ? -1 : 1);
      const x = x0 + (x1 - x0) * eased + (this.cell - 2 - this.dot) / 2, y = y0 + (y1 - y0) * eased + bend * 4 * eased * (1 - eased) + (16 - this.dot) / 2;
      dots[i].setAttribute("x", x);
      dots[i].setAttribute("y", y);
      dots[i].setAttribute("class", `dot ${kind}`);
    });
    for (let i = paths.length; i < dots.length; i++) dots[i].setAttribute("class", "dot off");
    return paths.length;
  }
}
