"use strict";
// Below the panels: what every rank does over the time of the step, its live bytes by part, and a cursor through both.

const LANES = ["compute", "gather", "reduce", "update"];

class Lanes {
  constructor(svg, rec, onTime) {
    this.svg = svg;
    this.rec = rec;
    svg.replaceChildren();
    this.left = 122;
    this.right = 1190;
    this.end = rec.events[rec.events.length - 1][0];
    const n = rec.ranks, bar = n <= 2 ? 17 : n <= 4 ? 13 : 9, chart = n <= 2 ? 84 : n <= 4 ? 56 : 36;
    let y = 8;
    for (let rank = 0; rank < n; rank++) {
      shape(svg, "text", { class: "name", x: 0, y: y + 12 }, `rank ${rank}`);
      for (const lane of LANES) {
        if (n <= 4) shape(svg, "text", { class: "lane", x: this.left - 8, y: y + bar - 4, "text-anchor": "end" }, lane);
        shape(svg, "rect", { class: "track", x: this.left, y, width: this.right - this.left, height: bar - 2 });
        this.bars(rank, lane, y, bar - 2);
        y += bar;
      }
      y += 8;
    }
    y += 8;
    const peak = Math.max(...rec.live.map((points) => this.stack(points).peak));
    shape(svg, "text", { class: "lane", x: this.left, y: y + 4 }, `live bytes by part (highest peak of all ranks: ${megabytes(peak)})`);
    y += 12;
    for (let rank = 0; rank < n; rank++) {
      shape(svg, "text", { class: "name", x: 0, y: y + 12 }, `rank ${rank}`);
      this.areas(rank, y, chart, peak);
      y += chart + 8;
    }
    for (let i = 0; i <= 4; i++) {
      const x = this.x((this.end * i) / 4);
      shape(svg, "text", { class: "lane", x, y: y + 8, "text-anchor": i === 4 ? "end" : i ? "middle" : "start" },
        `${((this.end * i) / 4000).toFixed(1)} ms`);
    }
    this.cursor = shape(svg, "line", { class: "cursor", x1: 0, x2: 0, y1: 2, y2: y });
    svg.setAttribute("viewBox", `0 0 1200 ${y + 14}`);
    svg.onclick = (click) => {
      const at = svg.createSVGPoint();
      [at.x, at.y] = [click.clientX, click.clientY];
      const time = ((at.matrixTransform(svg.getScreenCTM().inverse()).x - this.left) / (this.right - this.left)) * this.end;
      if (time >= 0) onTime(Math.min(time, this.end));
    };
  }

  x(time) {
    return this.left + (this.right - this.left) * Math.min(1, time / this.end);
  }

  // `room` is the time at which the next bar of the line begins: a number next to a narrow bar must end before it.
  bar(begins, ends, y, height, kind, text, title, room = 0) {
    const x = this.x(begins), width = Math.max(1.5, this.x(ends) - x);
    const made = shape(this.svg, "rect", { class: `bar ${kind}`, x, y, width, height });
    shape(made, "title", {}, title);
    if (text && width > 6.5 * text.length + 4 && height > 10) {
      shape(this.svg, "text", { class: `inside ${kind}`, x: x + width / 2, y: y + height / 2 + 4, "text-anchor": "middle" }, text);
    } else if (text && room && height >= 6) {
      const small = Math.min(11, height + 2), wide = 0.62 * small * text.length, inside = width > wide + 2;
      if (!inside && this.x(room) < x + width + wide + 3) return;
      shape(this.svg, "text", { class: `inside ${kind}`, style: `font-size: ${small}px`, y: y + height / 2 + 0.36 * small,
        x: inside ? x + width / 2 : x + width + 2, "text-anchor": inside ? "middle" : "start" }, text);
    }
  }

  bars(rank, lane, y, height) {
    const { rec } = this, short = (name) => name.replace(/^.*\.(?=\d+$)/, "").replace("bucket ", "");
    if (lane === "compute" || lane === "update") {
      for (const [who, unit, step, begins, ends] of rec.work) {
        const kind = { 1: "forward", 2: "backward", 4: "update" }[step[0]] || "other";
        if (who !== rank || (kind === "update") !== (lane === "update")) continue;
        this.bar(begins, ends, y, height, kind, kind === "other" ? "" : kind === "update" ? "update" : short(unit),
          `${kind === "other" ? (/^\d/.test(step) ? `step ${step}` : step) : `${unit}, ${kind}`}: ${((ends - begins) / 1000).toFixed(2)} ms`);
      }
      if (lane === "compute") {
        for (const [who, begins, ends, which] of rec.waits) {
          if (who !== rank) continue;
          const { kind, row } = rec.collectives[which];
          this.bar(begins, ends, y, height, "waiting", "", `waits for the ${kind} of ${rowName(rec, row)}: ${((ends - begins) / 1000).toFixed(2)} ms`);
        }
      }
      return;
    }
    // Collectives that are in flight at the same time share the lane's height.
    const mine = rec.collectives.map((c) => [c.issued[rank], c.ended[rank] ?? this.end, c])
      .filter(([issued, , c]) => issued !== null && (c.kind === "all-gather" || c.kind === "broadcast") === (lane === "gather"));
    const free = [];
    const placed = mine.sort((a, b) => a[0] - b[0]).map((entry) => {
      let line = free.findIndex((until) => until <= entry[0]);
      if (line < 0) line = free.push(0) - 1;
      free[line] = entry[1];
      return [...entry, line];
    });
    const part = height / Math.min(3, Math.max(1, free.length));
    placed.forEach(([issued, ended, collective, line], i) => {
      const room = (placed.slice(i + 1).find((other) => other[3] === line) || [this.end])[0];
      const { kind, row } = collective, top = y + Math.min(line, 2) * part, name = rowName(rec, row);
      const last = collective.issued.includes(null) ? ended : Math.max(...collective.issued);
      const title = `${kind} of ${name}, ${megabytes(collective.nbytes)}: ${((ended - last) / 1000).toFixed(2)} ms after the last rank has started it`;
      if (last > issued) this.bar(issued, Math.min(last, ended), top, part, "early", "", `${title}; before that this rank waited for the last one`);
      if (ended > last) this.bar(last, ended, top, part, lane, short(name), title, room);
    });
  }

  stack(points) {
    const now = this.rec.parts.map(() => 0), found = [];
    let peak = 0;
    for (const [moment, ...pairs] of points) {
      for (let i = 0; i < pairs.length; i += 2) now[pairs[i]] = pairs[i + 1];
      found.push([moment, now.slice()]);
      peak = Math.max(peak, now.reduce((a, b) => a + b, 0));
    }
    return { found, peak };
  }

  areas(rank, y, height, peak) {
    const { found } = this.stack(this.rec.live[rank]), base = new Array(found.length).fill(0);
    shape(this.svg, "rect", { class: "track", x: this.left, y, width: this.right - this.left, height });
    this.rec.parts.forEach((part, p) => {
      const below = base.slice();
      found.forEach(([, bytes], i) => { base[i] += bytes[p]; });
      const up = (bytes) => (y + height - (height * bytes) / peak).toFixed(1);
      // Steps: a value holds until the next point.
      const edge = (values) => found.map(([moment], i) => {
        const until = i + 1 < found.length ? found[i + 1][0] : this.end;
        return [[this.x(moment).toFixed(1), up(values[i])], [this.x(until).toFixed(1), up(values[i])]];
      }).flat();
      const outline = [...edge(base), ...edge(below).reverse()];
      const area = shape(this.svg, "polygon", { class: `part ${partClass(part)}`, points: outline.map((point) => point.join(",")).join(" ") });
      shape(area, "title", {}, part);
    });
  }

  move(time) {
    const x = this.x(time);
    this.cursor.setAttribute("x1", x);
    this.cursor.setAttribute("x2", x);
  }
}

function partClass(part) {
  return part.replace(/ /g, "-");
}
