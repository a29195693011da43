"use strict";
// The code pane of one recording: a chapter's source, and the lines with the label that is open on one rank.

function element(parent, name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  parent.append(made);
  return made;
}

class Code {
  constructor(box, rec) {
    this.box = box;
    this.rec = rec;
    this.chapter = null;
    box.replaceChildren();
    const head = element(box, "header");
    element(head, "h2", "", rec.title);
    this.tabs = element(head, "span", "tabs");
    this.here = element(box, "p", "here");
    this.source = element(box, "div", "source");
    this.source.tabIndex = 0;
    this.source.setAttribute("role", "region");
    this.source.setAttribute("aria-label", `the code of ${rec.title}`);
    this.files = {};                     // chapter: its element, with `rows` by line
    for (const chapter of Object.keys(rec.chapters)) {
      const tab = element(this.tabs, "button", "", `zero${chapter}.py`);
      tab.dataset.chapter = chapter;
      tab.onclick = () => this.open(Number(chapter));
    }
    this.has = this.tabs.childElementCount > 0;
    this.source.hidden = !this.has;
    box.classList.toggle("none", !this.has);
  }

  build(chapter) {
    const source = sourceOf(this.rec, chapter), file = element(this.source, "div", "file"), rows = [null];
    const folds = new Map(docstrings(source));
    let folded = 0;
    coloured(source).forEach((pieces, i) => {
      const line = i + 1, text = pieces.map(([, piece]) => piece).join("");
      const row = element(file, "div", "line");
      row.dataset.line = line;
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
    return { file, rows };
  }

  // Show a chapter's file.
  open(chapter) {
    this.files[chapter] ||= this.build(chapter);
    this.chapter = chapter;
    for (const [each, { file }] of Object.entries(this.files)) file.hidden = Number(each) !== chapter;
    for (const tab of this.tabs.children) tab.setAttribute("aria-pressed", Number(tab.dataset.chapter) === chapter);
  }

  // To event k, as `rank` sees it.
  draw(k, rank) {
    const { rec } = this;
    for (const row of this.source.querySelectorAll(".at")) row.classList.remove("at", "still");
    const last = lastEventOf(rec, k, rank), places = last === null ? null : placesAt(rec, last);
    if (!this.has) {
      this.here.textContent = `The code of ${rec.title} is not in the chapters.`;
      return;
    }
    if (!places) {
      if (this.chapter === null) this.open(Number(Object.keys(rec.chapters).pop()));
      const [, , what] = last === null ? [] : rec.events[last];
      this.here.textContent = last === null ? `Rank ${rank} has not begun.`
        : what === "over" ? `Rank ${rank}: the step is over, and training_step has returned.`
        : what === "end" ? `Rank ${rank}: no line caused this, because the collective ended in the background.`
        : `Rank ${rank}: no label of a chapter is open.`;
      return;
    }
    const [[chapter]] = places;
    this.open(chapter);
    for (const [, , from, to] of places) {
      for (let line = from; line <= to; line++) {
        this.files[chapter].rows[line].classList.add("at");
        this.files[chapter].rows[line].classList.toggle("still", last !== k);
      }
    }
    const where = places.map(([, name, from, to]) => `${name}, lines ${from} to ${to}`).join("; or ");
    this.here.textContent = `Rank ${rank}${last === k ? "" : " is still"} in zero${chapter}.py: ${where}.`;
    this.scrollTo(this.files[chapter].rows[places[0][2]]);
  }

  // Only the pane scrolls, never the page.
  scrollTo(row) {
    if (row.hidden) return;
    const top = row.getBoundingClientRect().top - this.source.getBoundingClientRect().top + this.source.scrollTop;
    const room = this.source.clientHeight;
    const seen = top - this.source.scrollTop;
    if (seen < room * 0.12 || seen > room * 0.7) this.source.scrollTop = top - room * 0.36;
  }
}
