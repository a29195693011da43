"use strict";
// The lines of the chapters: which one is running, which events a line causes, and the colours of the source.

// The calls that led to event k, [chapter, line] each, the outermost first; the last one has the running line.
function wayTo(rec, k) {
  const index = rec.lines ? rec.lines[k] : -1;
  return index < 0 ? null : rec.ways[index];
}

// Whether a line causes event k. A collective that ends while its rank does something else is caused by no line.
function isCaused(rec, k) {
  return wayTo(rec, k) !== null && !(rec.events[k][2] === "end" && !rec.events[k][4]);
}

// Where a rank is at event k: at its last event so far. Null before its first one.
function lastEventOf(rec, k, rank) {
  for (let i = k; i >= 0; i--) if (rec.events[i][1] === rank) return i;
  return null;
}

// {"3:388": {direct, through}} of a rank: the events that a line causes itself, and those that it causes by a call.
function eventsByLine(rec, rank) {
  const found = {};
  rec.events.forEach((event, k) => {
    if (event[1] !== rank || !isCaused(rec, k)) return;
    const way = wayTo(rec, k);
    way.forEach(([chapter, line], depth) => {
      const of = (found[`${chapter}:${line}`] ||= { direct: [], through: [] });
      of[depth === way.length - 1 ? "direct" : "through"].push(k);
    });
  });
  return found;
}

// A line goes to the events that it causes itself or, if there are none, to those that it causes by a call.
function eventsOf(of) {
  return !of ? [] : of.direct.length ? of.direct : of.through;
}

const SOURCES = JSON.parse(document.getElementById("sources").textContent);
function sourceOf(rec, chapter) {
  return SOURCES[rec.chapters[chapter]];
}

function lineOf(rec, [chapter, line]) {
  return sourceOf(rec, chapter).split("\n")[line - 1];
}

// A line without its indentation and comment.
function codeOf(rec, place) {
  return coloured(lineOf(rec, place))[0].filter(([kind]) => kind !== "comment").map(([, text]) => text).join("").trim();
}

// "send", or "Reduction.start" outside the class of the engine.
function functionOf(rec, [chapter, line]) {
  const lines = sourceOf(rec, chapter).split("\n"), indent = (text) => text.search(/\S/);
  let name = "", limit = indent(lines[line - 1]);
  for (let i = line - 2; i >= 0 && limit > 0; i--) {
    const found = /^\s*(def|class) (\w+)/.exec(lines[i]);
    if (!found || indent(lines[i]) >= limit) continue;
    limit = indent(lines[i]);
    if (found[1] === "def") name = found[2];
    else if (!/^ZeRO\d/.test(found[2])) name = `${found[2]}.${name}`;
  }
  return name;
}

const TOKEN = new RegExp([
  /(#.*)/, /([rbf]{0,2}(?:"""[\s\S]*?"""|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'))/,
  /\b((?:and|as|assert|break|class|continue|def|del|elif|else|except|False|finally|for|from|if|import|in|is|lambda|None|not|or|pass|raise|return|True|try|while|with|yield))\b/,
  /((?<=\b(?:def|class) )\w+)/, /\b(self)\b/, /\b(\d[\d_.]*(?:e-?\d+)?)\b/,
].map((part) => part.source).join("|"), "g");
const TOKEN_KINDS = ["comment", "string", "keyword", "defined", "self", "digits"];

// For each line of the source its pieces: [kind or "", text].
function coloured(source) {
  const lines = [[]];
  const add = (kind, text) => text.split("\n").forEach((piece, i) => {
    if (i) lines.push([]);
    if (piece) lines[lines.length - 1].push([kind, piece]);
  });
  let end = 0;
  for (const found of source.matchAll(TOKEN)) {
    add("", source.slice(end, found.index));
    add(TOKEN_KINDS[found.slice(1).findIndex((group) => group !== undefined)], found[0]);
    end = found.index + found[0].length;
  }
  add("", source.slice(end));
  return lines;
}

// [first, last] of each docstring that has several lines.
function docstrings(source) {
  const found = [];
  for (const match of source.matchAll(/^[ ]*"""[\s\S]*?"""/gm)) {
    const first = source.slice(0, match.index).split("\n").length, more = match[0].split("\n").length - 1;
    if (more) found.push([first, first + more]);
  }
  return found;
}
