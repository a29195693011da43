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
      // cells[row][column][layer] = bytes in each of the N cells; versions[row][layer] = 0, 1, -1 (neither) or null
      cells: rec.rows.map(() => COLUMNS.map(() => [new Array(n).fill(0), new Array(n).fill(0)])),
      versions: rec.rows.map(() => [new Array(n).fill(null), new Array(n).fill(null)]),
      elsewhere: 0,                    // bytes of state that belong to no row
      live: rec.parts.map(() => 0),    // bytes alive by part: what the memory ledger says
      step: "", unit: "", phase: "",   // the step, the unit that computes and "forward" or "backward"
      waitsFor: null,                  // number of the collective without which it cannot go on
      over: false, failed: false,
    });
  }

  // Memory, up to the event, and what was seen of the weights until the next one.
  let seen = 0;
  const look = (until) => {
    while (seen < rec.versions.length && rec.versions[seen][0] < until) {
      const [, rank, row, layer, versions] = rec.versions[seen++];
      ranks[rank].versions[row][layer] = eachCell(versions, n);
    }
  };
  for (const [moment, rank, row, column, layer, bytes] of rec.changes) {
    if (moment > time) break;
    look(moment);
    if (row < 0) {
      ranks[rank].elsewhere += Array.isArray(bytes) ? bytes[0] : bytes;
      continue;
    }
    const cells = eachCell(bytes, n);
    ranks[rank].cells[row][column][layer] = cells;
    if (column === 0) {
      ranks[rank].versions[row][layer] = ranks[rank].versions[row][layer].map((v, cell) => cells[cell] ? v : null);
    }
  }
  look(next);
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

// The event of another recording that belongs to event k of this one: there, too, rank 0 has begun as many computations.
function sameMoment(rec, k, other) {
  const begun = (events) => events.filter((e) => e[1] === 0 && (e[2] === "compute" || e[2] === "updated")).length;
  const wanted = begun(rec.events.slice(0, k + 1));
  if (k === rec.events.length - 1) return other.events.length - 1;
  let count = 0, found = 0;
  for (let i = 0; i < other.events.length; i++) {
    const [, rank, what] = other.events[i];
    if (rank === 0 && (what === "compute" || what === "updated")) count++;
    if (count <= wanted) found = i;
  }
  if (wanted === 0) return Math.min(k, found);
  // Both have begun the same computation; as far on from there as here, but not into the next one.
  const start = (rec2) => {
    let c = 0;
    for (let i = 0; i < rec2.events.length; i++) {
      const [, rank, what] = rec2.events[i];
      if (rank === 0 && (what === "compute" || what === "updated") && ++c === wanted) return i;
    }
    return 0;
  };
  return Math.min(found, start(other) + Math.max(0, k - start(rec)));
}
