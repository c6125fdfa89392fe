"use strict";
// What is under the pointer, and looking closer: drag to move, pinch or Ctrl and wheel to zoom, Shift and wheel to zoom
// ranks alone, double click to zoom in, arrow keys from micro-batch to micro-batch. At the end, everything starts.

// ---- the tooltip that all pictures share

const tip = document.getElementById("tip");
function showTip(lines, x, y) {
  tip.replaceChildren(...lines.map((line, i) => Object.assign(document.createElement(i ? "div" : "strong"), { textContent: line })));
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect(), edge = document.documentElement.clientWidth;
  tip.style.left = `${clamp(x + 14, 4, edge - width - 4)}px`;
  tip.style.top = `${y + 18 + height > window.innerHeight ? Math.max(4, y - height - 12) : y + 18}px`;
}
const hideTip = () => { tip.hidden = true; };

class InteractiveTimeline extends Timeline {
  constructor(figure, plan, documents, horizon, others) {
    super(figure, plan, documents, horizon);
    this.others = others;
    this.pointers = new Map();
    this.listen();
  }

  zoom(factor, x, y, ranksAlone = false) {
    const plot = this.plot(), { view, plan, horizon } = this;
    const shrink = (low, high, at, least, all) => {
      const span = clamp((high - low) / factor, Math.min(least, all), all), start = clamp(at - ((at - low) / (high - low)) * span, 0, all - span);
      return [start, start + span];
    };
    const across = clamp((x - plot.left) / plot.width, 0, 1), down = clamp((y - plot.top) / plot.height, 0, 1);
    if (!ranksAlone) [view.t0, view.t1] = shrink(view.t0, view.t1, view.t0 + across * (view.t1 - view.t0), horizon / 1e5, horizon);
    [view.r0, view.r1] = shrink(view.r0, view.r1, view.r0 + down * (view.r1 - view.r0), 4, plan.rows);
    this.draw();
  }

  move(pixelsX, pixelsY) {
    const plot = this.plot(), { view } = this, time = view.t1 - view.t0, rows = view.r1 - view.r0;
    view.t0 = clamp(view.t0 + (pixelsX / plot.width) * time, 0, this.horizon - time);
    view.r0 = clamp(view.r0 + (pixelsY / plot.height) * rows, 0, this.plan.rows - rows);
    view.t1 = view.t0 + time;
    view.r1 = view.r0 + rows;
    this.draw();
  }

  // The member that a row runs at a time, or null where it waits; index into plan.ofRow of the first that ends later.
  at(row, time) {
    const { plan } = this;
    let next = plan.firstOfRow[row];
    while (next < plan.firstOfRow[row + 1] && plan.end[plan.batch[plan.ofRow[next]]] <= time) next++;
    const member = next < plan.firstOfRow[row + 1] ? plan.ofRow[next] : null;
    return { next, member: member !== null && plan.begin[plan.batch[member]] <= time ? member : null };
  }

  point(x, y, clientX, clientY) {
    const plot = this.plot(), { view, plan } = this;
    const time = view.t0 + ((x - plot.left) / plot.width) * (view.t1 - view.t0);
    const row = Math.floor(view.r0 + ((y - plot.top) / plot.height) * (view.r1 - view.r0));
    const inside = x >= plot.left && x < plot.left + plot.width && y >= plot.top && y < plot.top + plot.height;
    if (!inside || row < 0 || row >= plan.rows || time >= plan.makespan) return this.select(null);
    const { next, member } = this.at(row, time);
    if (member !== null) return this.select(member, clientX, clientY);
    const ofRow = (n) => plan.batch[plan.ofRow[n]];
    const from = next > plan.firstOfRow[row] ? plan.end[ofRow(next - 1)] : 0;
    const until = next < plan.firstOfRow[row + 1] ? plan.begin[ofRow(next)] : plan.makespan;
    this.select(null);
    showTip([`Rank ${row * plan.every} is idle`, `from ${seconds(from)} for ${seconds(until - from)}`], clientX, clientY);
  }

  select(member, clientX, clientY) {
    const changed = member !== this.selected;
    this.selected = member;
    if (changed) this.draw();
    if (member === null) return hideTip();
    showTip(describe(this.plan, this.documents, member), clientX, clientY);
  }

  // Keys: to the neighbour of the selected micro-batch in time or on the next rank; the view follows.
  step(rows, order) {
    const { plan, view } = this;
    let member = this.selected;
    if (member === null) member = plan.ofRow[0];
    else if (order) {
      const row = plan.row[member], place = plan.ofRow.subarray(plan.firstOfRow[row], plan.firstOfRow[row + 1]).indexOf(member);
      member = plan.ofRow[clamp(plan.firstOfRow[row] + place + order, plan.firstOfRow[row], plan.firstOfRow[row + 1] - 1)];
    } else {
      const i = plan.batch[member], middle = (plan.begin[i] + plan.end[i]) / 2;
      let row = plan.row[member] + rows;
      while (row >= 0 && row < plan.rows && plan.firstOfRow[row] === plan.firstOfRow[row + 1]) row += rows;
      if (row < 0 || row >= plan.rows) return;
      const { next, member: there } = this.at(row, middle);
      member = there ?? plan.ofRow[Math.min(next, plan.firstOfRow[row + 1] - 1)];
    }
    const i = plan.batch[member], row = plan.row[member], time = view.t1 - view.t0, height = view.r1 - view.r0;
    if (plan.begin[i] < view.t0 || plan.begin[i] >= view.t1) view.t0 = clamp(plan.begin[i] - time / 4, 0, this.horizon - time);
    if (row < view.r0 || row + 1 > view.r1) view.r0 = clamp(row - height / 2, 0, plan.rows - height);
    view.t1 = view.t0 + time;
    view.r1 = view.r0 + height;
    const plot = this.plot(), box = this.canvas.getBoundingClientRect();
    this.selected = member;
    this.draw();
    const x = clamp(this.x((plan.begin[i] + plan.end[i]) / 2, plot), plot.left, plot.left + plot.width);
    showTip(describe(plan, this.documents, member), box.left + x, box.top + this.y(row + 0.5, plot));
  }

  listen() {
    const { canvas, pointers } = this, here = (event) => [event.offsetX, event.offsetY];
    canvas.addEventListener("pointerdown", (event) => {
      pointers.set(event.pointerId, here(event));
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      const [x, y] = here(event), before = pointers.get(event.pointerId);
      if (!before) return this.point(x, y, event.clientX, event.clientY);
      const others = [...pointers].filter(([id]) => id !== event.pointerId).map(([, at]) => at);
      if (others.length) {
        const [ox, oy] = others[0], apart = (at) => Math.hypot(at[0] - ox, at[1] - oy);
        this.zoom(clamp(apart([x, y]) / Math.max(1, apart(before)), 0.5, 2), (x + ox) / 2, (y + oy) / 2);
      } else if (Math.hypot(x - before[0], y - before[1]) < 3 && !before.moved) return;
      else this.move(before[0] - x, before[1] - y);
      hideTip();
      pointers.set(event.pointerId, Object.assign([x, y], { moved: true }));
    });
    const release = (event) => {
      const before = pointers.get(event.pointerId);
      pointers.delete(event.pointerId);
      if (event.type === "pointerup" && before && !before.moved) this.point(...here(event), event.clientX, event.clientY);
    };
    canvas.addEventListener("pointerup", release);
    canvas.addEventListener("pointercancel", release);
    canvas.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") this.select(null); });
    canvas.addEventListener("dblclick", (event) => this.zoom(2.5, ...here(event)));
    canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey && !event.shiftKey) return;
      event.preventDefault();
      const turned = event.deltaY || event.deltaX;    // some systems turn the wheel sideways with Shift
      this.zoom(2 ** (-turned / 200), ...here(event), event.shiftKey);
    }, { passive: false });
    canvas.addEventListener("keydown", (event) => this.key(event));
    canvas.addEventListener("blur", () => this.select(null));
    for (const button of this.figure.querySelectorAll("button"))
      button.addEventListener("click", () => this.command(button.dataset.command));
  }

  command(name) {
    const plot = this.plot();
    if (name === "all") { this.all(); this.draw(); }
    else if (name === "compare") for (const timeline of this.others) { timeline.all(true); timeline.draw(); }
    else this.zoom(name === "out" ? 0.5 : 2, plot.left + plot.width / 2, plot.top + plot.height / 2, name === "ranks");
  }

  key(event) {
    const { key, shiftKey } = event, pan = 60;
    const arrows = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (key in arrows && shiftKey) this.move(pan * arrows[key][0], pan * arrows[key][1]);
    else if (key in arrows) this.step(arrows[key][1], arrows[key][0]);
    else if (key === "+" || key === "=") this.command("in");
    else if (key === "-") this.command("out");
    else if (key === "r" || key === "R") this.command("ranks");
    else if (key === "0") this.command("all");
    else if (key === "Escape") this.select(null);
    else return;
    event.preventDefault();
  }
}

// ---- charts of single ranks: what lies under the pointer

function listenToChart(chart) {
  const { first, last, series } = JSON.parse(chart.dataset.values), plot = chart.querySelector("svg");
  const format = { tokens: (n) => plural(n, "token"), bytes };
  let place = 0;
  const show = (x, y) => {
    const ranks = first[place] === last[place] ? `Rank ${whole(first[place])}` : `Ranks ${whole(first[place])} to ${whole(last[place])}`;
    showTip([ranks, ...series.map(([name, values, kind]) => `${name}: ${format[kind](values[place])}`)], x, y);
  };
  plot.addEventListener("pointermove", (event) => {
    const box = plot.getBoundingClientRect();
    place = clamp(Math.floor(((event.clientX - box.left) / box.width) * first.length), 0, first.length - 1);
    show(event.clientX, event.clientY);
  });
  plot.addEventListener("pointerleave", hideTip);
  plot.addEventListener("blur", hideTip);
  plot.addEventListener("keydown", (event) => {
    if (event.key === "Escape") return hideTip();
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    place = clamp(place + (event.key === "ArrowRight" ? 1 : -1), 0, first.length - 1);
    const box = plot.getBoundingClientRect();
    show(box.left + ((place + 0.5) / first.length) * box.width, box.top + box.height / 2);
    event.preventDefault();
  });
}

// A table that is wider than the page says so.
function sayWhatScrolls() {
  for (const box of document.querySelectorAll(".scroll")) box.classList.toggle("wider", box.scrollWidth > box.clientWidth);
}

async function start() {
  sayWhatScrolls();
  addEventListener("resize", sayWhatScrolls);
  document.querySelectorAll(".ranks-chart").forEach(listenToChart);
  if (typeof DecompressionStream === "undefined") throw new Error("this browser cannot read the timelines (DecompressionStream)");
  const data = JSON.parse(document.getElementById("plans").textContent);
  const documentsIn = async (packed) => packed && unpack(packed), timelines = [];
  const common = await documentsIn(data.documents);   // of plans of the same documents; others have their own
  for (const figure of document.querySelectorAll(".timeline")) {
    const packed = data.plans[Number(figure.dataset.plan)], plan = await readPlan(packed);
    const documents = (await documentsIn(packed.documents)) ?? common;
    timelines.push(new InteractiveTimeline(figure, plan, documents, data.horizon, timelines));
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => timelines.forEach((timeline) => timeline.draw()));
  timelines.forEach((timeline) => timeline.draw());
  document.documentElement.dataset.ready = "yes";
}

start().catch((error) => {
  document.documentElement.dataset.ready = "no";
  for (const figure of document.querySelectorAll(".timeline")) figure.prepend(`The timeline cannot be drawn: ${error.message}.`);
  console.error(error);
});
