"use strict";
// The code pane of one recording: a chapter's source, the running line of one rank, and the calls that led there.

function element(parent, name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  parent.append(made);
  return made;
}

class Code {
  // `onEvent(k)` is called when a click on a line leads to event k of this recording.
  constructor(box, rec, onEvent) {
    this.box = box;
    this.rec = rec;
    this.onEvent = onEvent;
    this.k = 0;
    this.rank = -1;
    this.chapter = null;
    box.replaceChildren();
    const head = element(box, "header");
    element(head, "h2", "", rec.title);
    this.tabs = element(head, "span", "tabs");
    this.here = element(box, "p", "here");
    this.way = element(box, "ol", "way");
    this.way.setAttribute("aria-label", "the calls that led to the line");
    this.source = element(box, "div", "source");
    this.source.tabIndex = 0;
    this.source.setAttribute("role", "region");
    this.source.setAttribute("aria-label", `the code of ${rec.title}`);
    this.effect = document.createElement("div");
    this.effect.className = "effect";
    this.files = {};                     // chapter: its element, with `rows` by line
    for (const chapter of Object.keys(rec.chapters || {})) {
      const tab = element(this.tabs, "button", "", `zero${chapter}.py`);
      tab.dataset.chapter = chapter;
      tab.onclick = () => this.open(Number(chapter));
    }
    this.has = this.tabs.childElementCount > 0;
    this.source.hidden = this.way.hidden = !this.has;
    box.classList.toggle("none", !this.has);
  }

  build(chapter) {
    const source = sourceOf(this.rec, chapter), file = element(this.source, "div", "file"), rows = [null];
    const idle = new Set();
    for (const [first, last] of this.rec.idle[chapter] || []) for (let i = first; i <= last; i++) idle.add(i);
    const folds = new Map(docstrings(source));
    let folded = 0;
    coloured(source).forEach((pieces, i) => {
      const line = i + 1, text = pieces.map(([, piece]) => piece).join("");
      const row = element(file, "div", idle.has(line) ? "line idle" : "line");
      row.dataset.line = line;
      element(row, "span", "times");
      element(row, "span", "number", String(line));
      const code = element(row, "code");
      // Indented by padding: a browser would break a long line after its leading spaces.
      code.style.setProperty("--indent", Math.max(0, text.search(/\S/)));
      pieces.forEach(([kind, piece], j) => {
        const shown = j ? piece : piece.trimStart();
        kind ? element(code, "span", kind, shown) : code.append(shown);
      });
      if (line <= folded) row.hidden = true;
      if (folds.has(line)) {
        const last = (folded = folds.get(line)), button = element(code, "button", "fold", `… ${last - line} more lines`);
        button.setAttribute("aria-expanded", "false");
        button.onclick = () => {
          const open = button.getAttribute("aria-expanded") === "false";
          for (let j = line + 1; j <= last; j++) rows[j].hidden = !open;
          button.setAttribute("aria-expanded", open);
          button.textContent = open ? "fold" : `… ${last - line} more lines`;
        };
      }
      rows.push(row);
    });
    file.onclick = (click) => {
      const row = click.target.closest(".line");
      if (row && !click.target.closest("button") && !String(getSelection())) this.click(chapter, Number(row.dataset.line));
    };
    return { file, rows };
  }

  // Show a chapter's file.
  open(chapter) {
    if (!this.files[chapter]) {
      this.files[chapter] = this.build(chapter);
      this.count(chapter);
    }
    this.chapter = chapter;
    for (const [each, { file }] of Object.entries(this.files)) file.hidden = Number(each) !== chapter;
    for (const tab of this.tabs.children) tab.setAttribute("aria-pressed", Number(tab.dataset.chapter) === chapter);
  }

  // How many events each line causes on the rank.
  count(chapter) {
    this.files[chapter].rows.forEach((row, line) => {
      if (!row) return;
      const of = this.byLine[`${chapter}:${line}`], events = eventsOf(of), times = row.firstChild;
      times.textContent = events.length ? `×${events.length}` : "";
      times.classList.toggle("through", Boolean(of) && !of.direct.length);
      row.classList.toggle("causes", events.length > 0);
      row.title = !events.length ? "" : of.direct.length ? `causes ${this.times(events.length)} on rank ${this.rank}: a click goes to the next one`
        : `its calls cause ${this.times(events.length)} on rank ${this.rank}: a click goes to the next one`;
    });
  }

  times(number) {
    return `${number} event${number === 1 ? "" : "s"}`;
  }

  // To event k, as `rank` sees it.
  draw(k, rank) {
    const { rec } = this;
    this.k = k;
    if (rank !== this.rank) {
      this.rank = rank;
      this.byLine = eventsByLine(rec, rank);
      for (const chapter of Object.keys(this.files)) this.count(Number(chapter));
    }
    for (const row of this.source.querySelectorAll(".at, .came")) {
      row.classList.remove("at", "came", "still");
      row.removeAttribute("aria-current");
    }
    this.effect.remove();
    this.way.replaceChildren();
    const last = lastEventOf(rec, k, rank), way = last === null ? null : wayTo(rec, last);
    this.place = way && way[way.length - 1];
    if (!this.has) {
      const own = rec.parts && /^(ddp|fsdp2)/.test(rec.run);
      this.here.textContent = own ? `${rec.title} is torch's own engine: its code is in torch, not in the chapters.`
        : "No line of a chapter was noted in this recording.";
      return;
    }
    if (!way) {
      if (this.chapter === null) this.open(Number(Object.keys(rec.chapters).pop()));
      const [, , what] = last === null ? [] : rec.events[last];
      this.here.textContent = last === null ? `Rank ${rank} has not begun.`
        : what === "over" ? `Rank ${rank}: the step is over, and training_step has returned.`
        : `Rank ${rank}: no line of a chapter is running.`;
      return;
    }
    const [chapter, line] = this.place;
    this.open(chapter);
    for (const [file, number] of way) {
      if (file === chapter && number !== line) this.files[file].rows[number].classList.add("came");
    }
    const row = this.files[chapter].rows[line], still = last !== k;
    row.classList.add("at");
    row.classList.toggle("still", still);
    row.setAttribute("aria-current", "true");
    this.effect.textContent = effect(rec, last);
    this.effect.style.setProperty("--indent", row.querySelector("code").style.getPropertyValue("--indent"));
    row.after(this.effect);
    this.here.textContent = this.sayWhere(last, still);
    this.drawWay(way);
    this.scrollTo(row);
  }

  sayWhere(last, still) {
    const { rec, rank } = this, [chapter, line] = this.place, events = eventsOf(this.byLine[`${chapter}:${line}`]);
    const at = `Rank ${rank}${still ? " is still" : ""} at zero${chapter}.py, line ${line}`;
    if (!isCaused(rec, last)) return `${at}. No line caused this: the collective ended in the background.`;
    return `${at}: number ${events.indexOf(last) + 1} of the ${this.times(events.length)} that it causes.`;
  }

  drawWay(way) {
    const { rec } = this;
    way.forEach((place, i) => {
      const item = element(this.way, "li"), button = element(item, "button", "", functionOf(rec, place));
      const [chapter, line] = place;
      if (i && chapter !== way[i - 1][0]) element(item, "small", "", ` zero${chapter}.py`);
      button.title = `zero${chapter}.py, line ${line}: ${codeOf(rec, place)}`;
      button.onclick = () => {
        this.open(chapter);
        this.scrollTo(this.files[chapter].rows[line]);
      };
    });
  }

  // Only the pane scrolls, never the page.
  scrollTo(row) {
    if (row.hidden) return;
    const top = row.getBoundingClientRect().top - this.source.getBoundingClientRect().top + this.source.scrollTop;
    const room = this.source.clientHeight;
    const seen = top - this.source.scrollTop;
    if (seen < room * 0.12 || seen > room * 0.7) this.source.scrollTop = top - room * 0.36;
  }

  // The next event that the line causes, from the start again after the last one. Null if it causes none.
  next(chapter, line, by = 1) {
    const events = eventsOf(this.byLine[`${chapter}:${line}`]);
    if (!events.length) return null;
    const on = by > 0 ? events.find((k) => k > this.k) : events.findLast((k) => k < this.k);
    return on ?? events[by > 0 ? 0 : events.length - 1];
  }

  click(chapter, line) {
    const k = this.next(chapter, line);
    if (k !== null) return this.onEvent(k);
    this.here.textContent = `Line ${line} of zero${chapter}.py causes no event on rank ${this.rank}.`;
  }
}
