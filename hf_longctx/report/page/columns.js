"use strict";
// A plan as report/plans/timeline_columns.py packs it -> typed arrays; its documents and numbers in words.

const SPLIT = 0;            // holder of a document that all ranks of its micro-batch share
const FIRST_OF_GROUP = [1, 2, 3, 5, 9, 17, 65, 257];              // ranks of a document, by colour

const groupOf = (ranks) => FIRST_OF_GROUP.findLastIndex((first) => ranks >= first);
const whole = (n) => Math.round(n).toLocaleString("en-US");
const plural = (n, noun) => `${whole(n)} ${noun}${n === 1 ? "" : "s"}`;
function short(tokens) {   // K is 1,024, as contexts are named
  const [size, unit] = [[2 ** 20, "M"], [2 ** 10, "K"]].find(([size]) => tokens >= size) || [1, ""], value = tokens / size;
  return `${Number.isInteger(value) || value >= 9.95 ? Math.round(value) : value.toFixed(1)}${unit}`;
}
const clamp = (x, low, high) => Math.min(Math.max(x, low), Math.max(low, high));

function seconds(ns) {
  const [size, unit] = [[1e9, "s"], [1e6, "ms"], [1e3, "µs"], [1, "ns"]].find(([size]) => ns >= size) || [1, "ns"];
  return `${Number((ns / size).toPrecision(4))} ${unit}`;
}

function bytes(n) {
  const power = clamp(Math.floor(Math.log2(Math.max(n, 1)) / 10), 0, 5);
  return `${Number((n / 1024 ** power).toPrecision(4))} ${["bytes", "KiB", "MiB", "GiB", "TiB", "PiB"][power]}`;
}

function roundStep(least, bases) {
  for (let size = 1e-12; ; size *= 10) for (const base of bases) if (base * size >= least) return base * size;
}

// ---- columns of integers, as report/plans/timeline_columns.py packs them

async function unpack(packed) {
  const text = atob(packed.data), raw = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) raw[i] = text.charCodeAt(i);
  const stream = new Blob([raw]).stream().pipeThrough(new DecompressionStream("deflate"));
  const planes = new Uint8Array(await new Response(stream).arrayBuffer());
  const columns = {};
  let at = 0;
  for (const [name, count, width] of packed.fields) {
    const column = (columns[name] = new Uint32Array(count));
    for (let byte = 0; byte < width; byte++)
      for (let i = 0; i < count; i++) column[i] |= planes[at++] << (8 * byte);
  }
  return columns;
}

function sumsBefore(counts) {
  const sums = new Uint32Array(counts.length + 1);
  for (let i = 0; i < counts.length; i++) sums[i + 1] = sums[i] + counts[i];
  return sums;
}

// Micro-batches, the members of each, and per row the members in order of time.
async function readPlan(packed) {
  const columns = await unpack(packed), count = columns.start.length;
  const plan = { ...packed, ...columns, firstMember: sumsBefore(columns.members), firstDoc: sumsBefore(columns.documents) };
  const members = columns.step.length;
  plan.row = new Uint32Array(members);
  plan.batch = new Uint32Array(members);
  plan.splits = new Uint32Array(count);
  plan.begin = new Float64Array(count);
  plan.end = new Float64Array(count);
  const runs = [];                                    // [micro-batch, first row, last row], flat
  for (let i = 0; i < count; i++) {
    plan.begin[i] = columns.start[i] * packed.tick;
    plan.end[i] = (columns.start[i] + columns.duration[i]) * packed.tick;
    for (let d = plan.firstDoc[i]; d < plan.firstDoc[i + 1]; d++) plan.splits[i] += columns.holder[d] === SPLIT;
    let row = -1;
    for (let m = plan.firstMember[i]; m < plan.firstMember[i + 1]; m++) {
      const follows = m > plan.firstMember[i] && columns.step[m] === 0;
      row += columns.step[m] + 1;
      plan.row[m] = row;
      plan.batch[m] = i;
      if (follows && plan.splits[i]) runs[runs.length - 1] = row;
      else runs.push(i, row, row);
    }
  }
  plan.runs = Uint32Array.from(runs);
  const perRow = new Uint32Array(packed.rows);
  for (const row of plan.row) perRow[row]++;
  plan.firstOfRow = sumsBefore(perRow);
  plan.ofRow = new Uint32Array(members);
  const next = plan.firstOfRow.slice();
  for (let m = 0; m < members; m++) plan.ofRow[next[plan.row[m]]++] = m;
  return plan;
}

// ---- what a member is, in words

// A document goes by its row of the data set where that is known, else by its place in the step.
const kindOf = (documents) => (documents.row ? "row" : "document");
const numberOf = (documents, doc) => (documents.row ? documents.row[doc] : doc);
const capital = (text) => text[0].toUpperCase() + text.slice(1);

// [number, tokens] of those of micro-batch i that its member at a position, from 1, holds whole; of SPLIT ones for 0.
function documentsOf(plan, documents, i, position) {
  const held = [];
  for (let d = plan.firstDoc[i]; d < plan.firstDoc[i + 1]; d++)
    if (plan.holder[d] === position) held.push([numberOf(documents, plan.doc[d]), documents.length[plan.doc[d]]]);
  return held;
}

function describe(plan, documents, member) {
  const i = plan.batch[member], rank = plan.row[member] * plan.every;
  const wholes = documentsOf(plan, documents, i, member - plan.firstMember[i] + 1), lines = [];
  if (plan.splits[i]) {
    const shared = documentsOf(plan, documents, i, SPLIT), tokens = plural(shared.reduce((sum, [, length]) => sum + length, 0), "token");
    const what = shared.length === 1 ? `${capital(kindOf(documents))} ${shared[0][0]}: ${tokens}` : `${plural(shared.length, "document")}, ${tokens}`;
    lines.push(`${what} over ${plural(plan.ranks[i], "rank")}`);
    lines.push(`rank ${rank} holds ${plural(plan.tokens[member], "token")}` + (wholes.length ? `, ${plural(wholes.length, "whole document")} among them` : ""));
  } else {
    const tokens = plural(plan.tokens[member], "token");
    lines.push(wholes.length === 1 ? `${capital(kindOf(documents))} ${wholes[0][0]}: ${tokens}, whole` : `${plural(wholes.length, "whole document")}, ${tokens}`);
    lines.push(`on rank ${rank}`);
  }
  lines.push(`starts at ${seconds(plan.begin[i])}, takes ${seconds(plan.end[i] - plan.begin[i])}`);
  if (wholes.length > 1) {
    const named = wholes.slice(0, 6).map(([doc, tokens]) => `${doc} (${whole(tokens)})`).join(", ");
    lines.push(`${kindOf(documents)}s (tokens): ${named}${wholes.length > 6 ? ` and ${wholes.length - 6} more` : ""}`);
  }
  return lines;
}
