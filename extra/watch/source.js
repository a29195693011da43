"use strict";
// The lines of the chapters: which ones have the open label, and the colours of the source.

// The places of the label that is open at event k, [chapter, function, first line, last line] each. Null without one.
function placesAt(rec, k) {
  const index = rec.labelled[k];
  return index < 0 ? null : rec.blocks[index];
}

// Where a rank is at event k: at its last event so far. Null before its first one.
function lastEventOf(rec, k, rank) {
  for (let i = k; i >= 0; i--) if (rec.events[i][1] === rank) return i;
  return null;
}

const SOURCES = JSON.parse(document.getElementById("sources").textContent);
function sourceOf(rec, chapter) {
  return SOURCES[rec.chapters[chapter]];
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
