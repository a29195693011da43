"use strict";
// The recording in plain English: a line for what has just happened, and questions about what comes next.

function megabytes(bytes) {
  if (!bytes) return "0";
  if (bytes >= 1e8) return `${(bytes / 1e6).toFixed(0)} MB`;
  return bytes >= 1e6 ? `${(bytes / 1e6).toFixed(2)} MB` : `${(bytes / 1e3).toFixed(bytes < 1e4 ? 1 : 0)} kB`;
}

function names(ranks) {
  if (ranks.length === 1) return `rank ${ranks[0]}`;
  return ranks.length > 3 ? `${ranks.length} ranks` : `ranks ${ranks.slice(0, -1).join(", ")} and ${ranks[ranks.length - 1]}`;
}

function rowName(rec, row) {
  return row < 0 ? "an unknown unit" : rec.rows[row].name;
}

const STEP_WORDS = {
  1: "step 1, forward: the model computes its loss",
  2: "step 2, backward: the gradients are computed, from the last unit to the first",
  3: "the rest of step 3: the gradients that are not reduced yet",
  4: "step 4: the optimizer updates the parameters that this rank owns",
  5: "step 5: the updated shards are gathered",
};

// What rank r does in an event, after "rank r ...".
function action(rec, event) {
  const [, , what, subject, more] = event;
  const of = (number) => `${rec.collectives[number].kind} of ${rowName(rec, rec.collectives[number].row)}`;
  switch (what) {
    case "step": return `begins step ${subject}`;
    case "compute": return `computes ${subject}, ${more}`;
    case "issue": return `starts the ${of(subject)}`;
    case "end": return `has received the ${of(subject)}`;
    case "free": return `frees the ${more[0] ? "whole gradients" : "gathered parameters"} of ${rowName(rec, subject)}`;
    case "updated": return "has updated its weights";
    case "error": return `stops: ${subject}`;
    default: return "has finished the step";
  }
}

// The line under the controls: what has just happened.
function sentence(rec, k) {
  const event = rec.events[k], [, rank, what, subject, more] = event, who = `Rank ${rank}`;
  if (what === "step") return `${who} begins ${STEP_WORDS[subject[0]] || `step ${subject}`}.`;
  if (what === "compute") {
    return more === "forward" ? `${who} computes ${subject}, forward: its activations are kept for backward.`
      : `${who} computes ${subject}, backward: the gradients of ${subject} are computed.`;
  }
  if (what === "issue") {
    const { kind, row, nbytes } = rec.collectives[subject], { missing } = stateAt(rec, k).collectives[subject];
    const why = {
      "all-gather": "every rank sends its shard and receives the whole parameters",
      "reduce-scatter": "every rank sends its whole gradients and receives its shard of the sum",
      "all-reduce": "every rank sends its whole gradients and receives the whole sum",
      broadcast: "one rank sends to all others",
    }[kind];
    const begin = `${who} starts the ${kind} of ${rowName(rec, row)}, ${megabytes(nbytes)}`;
    if (missing.length) return `${begin}. Nothing moves yet: ${names(missing)} ${missing.length > 1 ? "have" : "has"} not started it.`;
    return rec.ranks > 1 ? `${begin}. Now all ranks have started it and the bytes move: ${why}.` : `${begin}.`;
  }
  if (what === "end") {
    const { kind, row } = rec.collectives[subject], name = rowName(rec, row);
    const result = {
      "all-gather": `now it has the whole parameters of ${name}`,
      "reduce-scatter": `now it has its shard of the sum of all ranks' gradients of ${name}, and divides it by ${rec.ranks}`,
      "all-reduce": `now it has the sum of all ranks' gradients of ${name}, and divides it by ${rec.ranks}`,
    }[kind] || "now it has what was sent";
    const meanwhile = more ? "" : " in the background";
    return `The ${kind} of ${name} has ended on rank ${rank}${meanwhile}: ${result}.`;
  }
  if (what === "free") {
    const [column, nbytes] = more, what2 = column ? "whole gradients" : "gathered parameters";
    return `${who} frees the ${what2} of ${rowName(rec, subject)}: ${megabytes(nbytes)} are free again. Its own shard stays.`;
  }
  if (what === "updated") return `${who} has updated the weights that it owns.`;
  if (what === "error") return `${who} stops with an error: ${subject.length > 240 ? `${subject.slice(0, 240)} ...` : subject}`;
  const most = rec.live[rank].reduce((peak, _, i) => Math.max(peak, liveAt(rec, rank, i)), 0);
  return `${who} has finished the step. It has sent ${megabytes(rec.sent[rank])}, and its peak memory was ${megabytes(most)}.`;
}

// Bytes alive on a rank after point i of its `live`.
function liveAt(rec, rank, i) {
  const now = {};
  for (const [, ...pairs] of rec.live[rank].slice(0, i + 1)) {
    for (let j = 0; j < pairs.length; j += 2) now[pairs[j]] = pairs[j + 1];
  }
  return Object.values(now).reduce((sum, bytes) => sum + bytes, 0);
}

// Before event k: what does this rank do next? Null if there is nothing to ask. Else the question, four answers, and
// which of them is right. The wrong answers are from other moments of the same rank's step, the nearest first. Nothing is
// asked about the root's computation: its parts (embedding, head, loss) are in several places, so a reader could not know
// when it comes.
const ASKED = ["compute", "issue", "free", "updated"];
const isAsked = ([, , what, subject]) => ASKED.includes(what) && !(what === "compute" && subject === "root");
function question(rec, k) {
  if (k >= rec.events.length || !isAsked(rec.events[k])) return null;
  const rank = rec.events[k][1], right = action(rec, rec.events[k]);
  const others = rec.events.map((event, i) => [event, i])
    .filter(([event]) => event[1] === rank && isAsked(event))
    .sort((a, b) => Math.abs(a[1] - k) - Math.abs(b[1] - k)).map(([event]) => action(rec, event));
  const wrong = [...new Set(others)].filter((text) => text !== right).slice(0, 3);
  if (wrong.length < 3) return null;
  const place = (k * 7 + 3) % 4;       // not always the same place, but the same each time
  const answers = wrong.slice();
  answers.splice(place, 0, right);
  return { k, answers, right: place, text: `What does rank ${rank} do next?` };
}
