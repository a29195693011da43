"use strict";
// The controls: which recording, event and rank, how fast, what is asked. The address keeps all of these.

const BEAT = 900;                      // milliseconds of an event at speed 1
const calm = window.matchMedia && matchMedia("(prefers-reduced-motion: reduce)").matches;
const $ = (id) => document.getElementById(id);

const watch = {
  recordings: JSON.parse($("recordings").textContent),
  rec: null, k: 0, state: null, playing: false, beside: null, rank: 0, asked: null, right: 0, answered: 0,

  start() {
    for (const id of ["run", "beside"]) {
      for (const rec of this.recordings) $(id).add(new Option(rec.title, rec.run));
    }
    $("beside").closest("label").hidden = this.recordings.length < 2;
    for (let rank = 0; rank < Math.max(...this.recordings.map((rec) => rec.ranks)); rank++) {
      $("rank").add(new Option(`rank ${rank}`, rank));
    }
    const { run, event, beside } = document.body.dataset;
    this.fromAddress(run, Number(event) - 1, beside);
    addEventListener("hashchange", () => this.fromAddress(this.rec.run, this.k, $("beside").value));
    requestAnimationFrame((now) => this.frame(now));
  },

  // The address: #event=17&run=zero3, and &beside=ddp&rank=1.
  fromAddress(run, k, beside) {
    const at = new URLSearchParams(location.hash.slice(1));
    const known = (name) => this.recordings.find((rec) => rec.run === name);
    const rec = known(at.get("run")) || known(run) || this.recordings[0];
    const event = at.has("event") ? Number(at.get("event")) - 1 : k;
    this.rank = Number(at.get("rank")) || 0;
    this.setBeside(at.has("beside") ? at.get("beside") : beside);
    this.open(rec.run, Number.isInteger(event) ? event : 0);
  },

  toAddress() {
    clearTimeout(this.writing);
    this.writing = setTimeout(() => {    // later, and once: a browser takes some 200 changes in half a minute
      const beside = this.beside ? `&beside=${this.beside.rec.run}` : "";
      const rank = this.rank ? `&rank=${this.rank}` : "";
      const hash = `#event=${this.k + 1}&run=${this.rec.run}${beside}${rank}`;
      // A page inside a notebook has no address of its own.
      try { if (location.hash !== hash) history.replaceState(null, "", hash); } catch { /* then it keeps none */ }
    }, 100);
  },

  open(run, k) {
    const rec = this.recordings.find((each) => each.run === run);
    if (rec !== this.rec) {
      this.rec = rec;
      $("run").value = run;
      this.picture = new Picture($("picture"), rec);
      this.lanes = new Lanes($("lanes"), rec, (time) => this.goToTime(time));
      this.code = new Code($("code"), rec);
      $("scrub").max = rec.events.length - 1;
      $("about").textContent = [rec.about.model, `${rec.ranks} rank${rec.ranks > 1 ? "s" : ""}`, rec.about.hardware,
        rec.about.torch && `torch ${rec.about.torch}`].filter(Boolean).join("; ");
      $("command").textContent = rec.about.command || "";
      $("note").textContent = rec.about.note || "";
      $("note").hidden = !rec.about.note;
      for (const item of document.querySelectorAll("#parts [data-part]")) item.hidden = !rec.parts.includes(item.dataset.part);
      const ranks = rec.live.map((_, rank) => `rank ${rank}`).join(" | ");
      $("whose").textContent = `Live bytes of ${rec.title}, ${ranks}:`;
    }
    this.go(k);
  },

  setBeside(run) {
    const rec = this.recordings.find((each) => each.run === run);
    $("beside").value = rec ? run : "";
    for (const id of ["second", "below"]) $(id).hidden = !rec;
    const lanes = rec && new Lanes($("lanes2"), rec, () => {});
    $("code2").hidden = !rec;
    this.beside = rec ? { rec, lanes, picture: new Picture($("picture2"), rec), code: new Code($("code2"), rec) } : null;
    $("title2").textContent = $("title3").textContent = rec ? rec.title : "";
    if (this.rec) this.go(this.k);
  },

  // To event k. Everything on the page follows from it.
  go(k) {
    const { rec } = this;
    this.k = Math.max(0, Math.min(rec.events.length - 1, Math.round(k)));
    this.state = stateAt(rec, this.k);
    this.picture.draw(this.state);
    this.lanes.move(this.state.time);
    this.rank = Math.max(0, Math.min(rec.ranks - 1, this.rank));
    $("rank").value = this.rank;
    this.code.draw(this.k, this.rank);
    if (this.beside) {
      const other = sameMoment(rec, this.k, this.beside.rec);
      this.beside.code.draw(other, Math.min(this.rank, this.beside.rec.ranks - 1));
      const state = stateAt(this.beside.rec, other);
      this.beside.picture.draw(state);
      this.beside.lanes.move(state.time);
      $("caption2").textContent = sentence(this.beside.rec, other);
    }
    $("scrub").value = this.k;
    $("scrub").setAttribute("aria-valuetext", `event ${this.k + 1} of ${rec.events.length}`);
    $("count").textContent = `event ${this.k + 1} of ${rec.events.length}, ${(this.state.time / 1000).toFixed(2)} ms`;
    $("caption").textContent = sentence(rec, this.k);
    for (const item of document.querySelectorAll("#parts b")) {
      const part = rec.parts.indexOf(item.parentElement.dataset.part);
      item.textContent = part < 0 ? "" : this.state.ranks.map((me) => megabytes(me.live[part])).join(" | ");
    }
    this.closeQuestion();
    this.toAddress();
  },

  // From now on the page asks before every event, or never.
  askFirst(on) {
    $("ask").checked = on;
    const asked = on && !this.playing && this.k + 1 < this.rec.events.length ? question(this.rec, this.k + 1) : null;
    if (asked) this.ask(asked);
    else if (!on) this.closeQuestion();
  },

  // One event on, unless there is something to ask first.
  forth() {
    if (this.asked || this.k >= this.rec.events.length - 1) return;
    if ($("ask").checked) {
      const asked = question(this.rec, this.k + 1);
      if (asked) return void this.ask(asked);
    }
    this.go(this.k + 1);
  },

  back() {
    this.go(this.k - 1);
  },

  goToTime(time) {
    let k = 0;
    while (k + 1 < this.rec.events.length && this.rec.events[k + 1][0] <= time) k++;
    this.go(k);
  },

  play(on = !this.playing) {
    if (on && this.k >= this.rec.events.length - 1) this.go(0);
    this.playing = on;
    this.since = performance.now();
    $("play").textContent = on ? "❚❚ pause" : "▶ play";
    $("play").setAttribute("aria-pressed", on);
    // A screen reader reads single events aloud, but not a film.
    $("caption").setAttribute("aria-live", on ? "off" : "polite");
  },

  ask(asked) {
    this.asked = asked;
    $("question").hidden = false;
    $("asked").textContent = asked.text;
    $("verdict").textContent = "";
    $("answers").replaceChildren(...asked.answers.map((text, i) => {
      const button = document.createElement("button");
      button.textContent = `${i + 1}  ${text}`;
      button.onclick = () => this.answer(i);
      return button;
    }));
    $("answers").firstChild.focus({ preventScroll: true });
  },

  answer(i) {
    const { asked } = this;
    if (!asked || asked.given !== undefined) return;
    asked.given = i;
    const right = i === asked.right;
    this.answered++;
    this.right += right;
    [...$("answers").children].forEach((button, j) => {
      button.disabled = true;
      button.classList.toggle("right", j === asked.right);
      button.classList.toggle("wrong", j === i && !right);
    });
    $("verdict").textContent = `${right ? "Right" : "No"}. ${sentence(this.rec, asked.k)} (${this.right} of ${this.answered} right)`;
    const on = document.createElement("button");
    on.id = "go-on";
    on.textContent = "continue (→)";
    on.onclick = () => this.goOn();
    $("verdict").append(" ", on);
    on.focus({ preventScroll: true });
  },

  goOn() {
    const { k } = this.asked;
    this.closeQuestion();
    this.go(k);
  },

  closeQuestion() {
    if (!this.asked) return;
    const inside = $("question").contains(document.activeElement);
    this.asked = null;
    $("question").hidden = true;
    if (inside) $("forth").focus({ preventScroll: true });
    this.since = performance.now();
  },

  frame(now) {
    const speed = Number($("speed").value);
    if (this.playing && !this.asked) {
      if (this.k >= this.rec.events.length - 1) this.play(false);
      else if (now - this.since >= BEAT / speed) { this.since = now; this.forth(); }
    }
    if (!calm) {
      const part = ((now / 1100) * Math.min(2, Math.max(0.5, speed))) % 1;
      this.picture.fly(part);
      if (this.beside) this.beside.picture.fly(part);
    }
    requestAnimationFrame((next) => this.frame(next));
  },

  key(event) {
    const { target, key } = event;
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const choosing = target.tagName === "SELECT", pressing = target.tagName === "BUTTON" || target.type === "checkbox";
    const actions = {
      ArrowRight: () => (this.asked && this.asked.given !== undefined ? this.goOn() : this.forth()),
      ArrowLeft: () => this.back(),
      Home: () => this.go(0),
      End: () => this.go(Infinity),
      " ": () => this.play(),
      a: () => this.askFirst(!$("ask").checked),
      e: () => this.next(1),
      E: () => this.next(-1),
      r: () => this.follow((this.rank + 1) % this.rec.ranks),
      b: () => this.nextBeside(),
      "+": () => this.faster(1),
      "-": () => this.faster(-1),
    };
    for (let i = 0; i < 4; i++) if (this.asked && key === String(i + 1)) return void this.answer(i);
    if (!(key in actions)) return;
    // A list of choices needs its arrows and letters, a button its space.
    if (choosing || (pressing && key === " ")) return;
    event.preventDefault();
    actions[key]();
  },

  follow(rank) {
    this.rank = rank;
    this.go(this.k);
  },

  next(by) {
    const { recordings } = this, at = recordings.indexOf(this.rec);
    const rec = recordings[(at + by + recordings.length) % recordings.length];
    this.open(rec.run, sameMoment(this.rec, this.k, rec));
  },

  nextBeside() {
    const options = [...$("beside").options].map((option) => option.value).filter((run) => run !== this.rec.run);
    this.setBeside(options[(options.indexOf($("beside").value) + 1) % options.length]);
  },

  faster(by) {
    const at = $("speed").selectedIndex + by;
    if (at >= 0 && at < $("speed").options.length) $("speed").selectedIndex = at;
  },
};

$("run").onchange = () => watch.open($("run").value, sameMoment(watch.rec, watch.k, watch.recordings.find((r) => r.run === $("run").value)));
$("beside").onchange = () => watch.setBeside($("beside").value);
$("rank").onchange = () => watch.follow(Number($("rank").value));
$("ask").onchange = () => watch.askFirst($("ask").checked);
$("first").onclick = () => watch.go(0);
$("back").onclick = () => watch.back();
$("play").onclick = () => watch.play();
$("forth").onclick = () => watch.forth();
$("last").onclick = () => watch.go(Infinity);
$("scrub").oninput = () => watch.go(Number($("scrub").value));
narrow.onchange = () => {
  const beside = $("beside").value;
  watch.rec = null;
  watch.open($("run").value, watch.k);
  watch.setBeside(beside);
};
addEventListener("keydown", (event) => watch.key(event));
watch.start();
