"use strict";
// The state of all ranks after event k of a recording. The page draws only what is computed here, from the recording
// only (its fields: FORMAT in merge_ranks.py).

const HELD = 0, WHOLE = 1;           // layers of a cell: kept, or a whole buffer that comes and goes
const COLUMNS = ["parameters", "gradients", "optimizer state"];

// Reads a value of the recording: one number for all cells, or a list of numbers.
function eachCell(value, ranks) {
  return Array.isArray(value) ? value.slice() : new Array(ranks).fill(value);
}

function stateAt(rec, k) {
  const n = rec.ranks, time = rec.events[k][0];
  const next = k + 1 < rec.events.length ? rec.events[k + 1][0] : Infinity;
  const ranks = [];
  for (let rank = 0; rank < n; rank++) {
    ranks.push({
      // cells[row][column][layer] = bytes in each of the N cells
      cells: rec.rows.map(() => COLUMNS.map(() => [new Array(n).fill(0), new Array(n).fill(0)])),
      live: rec.parts.map(() => 0),    // bytes alive by part: what the memory ledger says
      step: "", unit: "", phase: "",   // the step, the unit that computes and "forward" or "backward"
      waitsFor: null,                  // number of the collective without which it cannot go on
      over: false, failed: false,
    });
  }

  for (const [moment, rank, row, column, layer, bytes] of rec.changes) {
    if (moment > time) break;
    ranks[rank].cells[row][column][layer] = eachCell(bytes, n);
  }
  rec.live.forEach((points, rank) => {
    for (const [moment, ...pairs] of points) {
      if (moment > time) break;
      for (let i = 0; i < pairs.length; i += 2) ranks[rank].live[pairs[i]] = pairs[i + 1];
    }
  });

  // Collectives: on each rank "" (not there yet), "waiting" (until the last rank has come), "moving" or "ended".
  const collectives = rec.collectives.map(() => ({ status: new Array(n).fill("") }));
  for (let i = 0; i <= k; i++) {
    const [, rank, what, subject, more] = rec.events[i], me = ranks[rank];
    if (what === "issue") collectives[subject].status[rank] = "waiting";
    if (what === "end") collectives[subject].status[rank] = "ended";
    if (what === "step") {
      me.step = subject;
      if (!/^[12]/.test(subject)) me.unit = me.phase = "";
    }
    if (what === "compute") [me.unit, me.phase] = [subject, more];
    const through = what === "free" && more[0] === 0 && me.unit && (rec.units[me.unit] || []).includes(subject);
    if (through) me.unit = me.phase = "";   // what it has freed it does not compute
    if (what === "over" || what === "error") [me.unit, me.phase, me.over, me.failed] = ["", "", true, what === "error"];
  }
  for (const collective of collectives) {
    const missing = collective.status.map((status, rank) => (status === "" ? rank : -1)).filter((rank) => rank >= 0);
    collective.missing = missing;      // the ranks that the others still wait for
    if (!missing.length) collective.status = collective.status.map((s) => (s === "waiting" ? "moving" : s));
  }
  // A rank waits if it does so for most of the time until the next event.
  for (const [rank, begins, ends, which] of rec.waits) {
    const from = Math.max(begins, time), until = Math.min(ends, next);
    if (next < Infinity && until - from > (next - time) / 2) ranks[rank].waitsFor = which;
  }
  return { k, time, ranks, collectives };
}

// What of `state` belongs to a column of a row on a rank: "", "waiting" or "moving". In an all-gather a rank's own cell
// does not move: it is there.
function underWay(rec, state, rank, row, column) {
  let found = "";
  rec.collectives.forEach((collective, number) => {
    const status = state.collectives[number].status[rank];
    if (collective.row !== row || (status !== "waiting" && status !== "moving")) return;
    if ((collective.kind === "all-gather" || collective.kind === "broadcast" ? 0 : 1) === column) found = status;
  });
  return found;
}

// The event of another recording that belongs to event k of this one: there, too, rank 0 has begun as many computations,
// and as many events have followed, if the next computation does not begin before that.
function sameMoment(rec, k, other) {
  const begins = ({ events }) => events.map((_, i) => i).filter((i) => {
    const [, rank, what] = events[i];
    return rank === 0 && (what === "compute" || what === "updated");
  });
  const here = begins(rec), there = begins(other), last = other.events.length - 1;
  if (k === rec.events.length - 1) return last;
  const begun = here.filter((i) => i <= k).length;
  const since = k - (here[begun - 1] ?? 0);
  return Math.min((there[begun] ?? last + 1) - 1, (there[begun - 1] ?? 0) + since);
}
