"use strict";
// The timeline of a plan on a canvas: ranks from top to bottom, time from left to right, and below, what share of the ranks
// in view does what. Where a rank is less than a few pixels high, each pixel has the mean colour of what its ranks do.

const TOP = 4, GUTTER = 68, AXIS = 42, STRIP = 64, GAP = 12, RIGHT = 32;   // pixels; a mark's text has room at the right end
const OUTSIDE = 4;          // pixels that rectangles may reach beyond the plot, so that edges there are not seen
const EXACT = 3;            // height of a rank from which rectangles are drawn
const LOWEST = 5;           // height of a run of ranks among pixels from which it has an edge

// ---- colours of the page's theme

function theme() {
  const style = getComputedStyle(document.documentElement), colour = (name) => style.getPropertyValue(name).trim();
  const light = (hex) => [1, 3, 5].map((at) => (parseInt(hex.slice(at, at + 2), 16) / 255) ** 2.2);
  const groups = FIRST_OF_GROUP.map((_, i) => colour(`--g${i}`)), idle = colour("--idle");
  const onIt = (hex) => { const [r, g, b] = light(hex); return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.18 ? "#111111" : "#ffffff"; };
  return {
    groups, idle, light: groups.map(light), idleLight: light(idle), onGroup: groups.map(onIt),
    paper: colour("--paper"), ink: colour("--ink"), muted: colour("--muted"), line: colour("--line"), bound: colour("--bound"), hatch: colour("--hatch"),
  };
}

class Timeline {
  constructor(figure, plan, documents, horizon) {
    Object.assign(this, { figure, plan, documents, horizon, selected: null });
    this.canvas = figure.querySelector("canvas");
    this.context = this.canvas.getContext("2d");
    this.bound = Number(figure.dataset.bound || NaN);   // a simulated run has none
    this.rowHeight = plan.rows <= 8 ? 30 : plan.rows <= 24 ? 20 : plan.rows <= 64 ? 9 : 460 / plan.rows;
    this.plotHeight = Math.max(60, Math.round(plan.rows * this.rowHeight));
    this.all();
    this.canvas.style.height = `${TOP + this.plotHeight + GAP + STRIP + AXIS}px`;
    // In the next frame, because drawing inside the observer may resize what is observed.
    new ResizeObserver(() => requestAnimationFrame(() => { if (figure.clientWidth !== this.width) this.draw(); })).observe(figure);
  }

  // All of this plan, or as much time as the longest of all plans takes.
  all(together = false) {
    const end = together ? this.horizon : 1.005 * Math.max(this.plan.makespan, this.bound || 0);
    this.view = { t0: 0, t1: Math.min(end, this.horizon), r0: 0, r1: this.plan.rows };
  }

  plot() {
    const width = this.figure.clientWidth;
    return { left: GUTTER, top: TOP, width: Math.max(40, width - GUTTER - RIGHT), height: this.plotHeight, all: width };
  }

  x(time, plot) { return plot.left + ((time - this.view.t0) / (this.view.t1 - this.view.t0)) * plot.width; }
  y(row, plot) { return plot.top + ((row - this.view.r0) / (this.view.r1 - this.view.r0)) * plot.height; }

  draw() {
    const plot = this.plot(), scale = window.devicePixelRatio || 1, { canvas, context: c } = this;
    const height = TOP + plot.height + GAP + STRIP + AXIS;
    canvas.width = Math.round(plot.all * scale);
    canvas.height = Math.round(height * scale);
    this.width = plot.all;
    canvas.dataset.plot = JSON.stringify({ ...plot, ...this.view });
    c.setTransform(scale, 0, 0, scale, 0, 0);
    c.font = "11px system-ui, sans-serif";
    this.theme = theme();
    c.save();
    c.beginPath();
    c.rect(plot.left, plot.top, plot.width, plot.height);
    c.clip();
    if (plot.height / (this.view.r1 - this.view.r0) >= EXACT) this.rectangles(plot);
    else this.pixels(plot);
    this.outline(plot);
    c.restore();
    this.strip(plot);
    this.axes(plot);
  }

  // Calls back with every run of ranks in view: micro-batch, left, right, top, bottom in pixels of the plot, first row.
  visible(plot, callback) {
    const { plan, view } = this, { runs } = plan;
    for (let at = 0; at < runs.length; at += 3) {
      const i = runs[at];
      if (plan.end[i] <= view.t0 || plan.begin[i] >= view.t1 || runs[at + 2] < view.r0 || runs[at + 1] >= view.r1) continue;
      const left = Math.max(this.x(plan.begin[i], plot), plot.left - OUTSIDE), right = Math.min(this.x(plan.end[i], plot), plot.left + plot.width + OUTSIDE);
      const top = Math.max(this.y(runs[at + 1], plot), plot.top - OUTSIDE), bottom = Math.min(this.y(runs[at + 2] + 1, plot), plot.top + plot.height + OUTSIDE);
      callback(i, left, right, top, bottom, runs[at + 1]);
    }
  }

  groupOfBatch(i) { return this.plan.splits[i] ? groupOf(this.plan.ranks[i]) : 0; }

  rectangles(plot) {
    const { context: c, plan, theme: colours } = this, end = clamp(this.x(plan.makespan, plot), plot.left, plot.left + plot.width);
    c.fillStyle = colours.idle;
    c.fillRect(plot.left, plot.top, end - plot.left, plot.height);
    c.strokeStyle = colours.hatch;
    c.lineWidth = 1;
    c.beginPath();
    for (let x = plot.left - plot.height; x < end; x += 9) { c.moveTo(x, plot.top + plot.height); c.lineTo(x + plot.height, plot.top); }
    c.stroke();
    c.fillStyle = colours.paper;
    c.fillRect(end, plot.top, plot.left + plot.width - end + 1, plot.height);
    this.visible(plot, (i, left, right, top, bottom, row) => {
      const group = this.groupOfBatch(i), width = right - left, height = bottom - top;
      c.fillStyle = colours.groups[group];
      c.fillRect(left, top, width, height);
      c.strokeStyle = colours.paper;
      c.lineWidth = clamp(Math.min(width, height) / 8, 0.2, 1);
      c.strokeRect(left, top, width, height);
      this.label(plot, i, left, right, top, bottom, row);
    });
  }

  // The most detailed label that fits into the part of a run that is in view, and on one side of the lower bound's line.
  label(plot, i, left, right, top, bottom, row) {
    const { context: c, plan } = this;
    [left, right] = [Math.max(left, plot.left), Math.min(right, plot.left + plot.width)];
    [top, bottom] = [Math.max(top, plot.top), Math.min(bottom, plot.top + plot.height)];
    const bound = this.x(this.bound, plot);
    if (left < bound && bound < right) [left, right] = bound - left > right - bound ? [left, bound - 3] : [bound + 3, right];
    if (bottom - top < 13 || right - left < 24) return;
    let position = SPLIT;
    if (!plan.splits[i]) position = plan.row.subarray(plan.firstMember[i], plan.firstMember[i + 1]).indexOf(row) + 1;
    const documents = documentsOf(plan, this.documents, i, position), tokens = documents.reduce((sum, [, length]) => sum + length, 0);
    const over = plan.splits[i] ? ` over ${whole(plan.ranks[i])} ranks` : "";
    const what = documents.length === 1 ? `${kindOf(this.documents)} ${documents[0][0]}` : plural(documents.length, "document");
    const texts = [`${what}: ${whole(tokens)} tokens${over}`, `${whole(tokens)} tokens${over}`, `${short(tokens)}${over}`, short(tokens)];
    const text = texts.find((text) => c.measureText(text).width + 8 <= right - left);
    if (!text) return;
    c.fillStyle = this.theme.onGroup[this.groupOfBatch(i)];
    c.textAlign = "center";
    c.textBaseline = "middle";
    c.fillText(text, (left + right) / 2, (top + bottom) / 2 + 0.5);
  }

  // Each pixel: the mean of what it covers, mixed as light is.
  pixels(plot) {
    const width = Math.round(plot.width), height = Math.round(plot.height), { theme: colours } = this;
    const sums = new Float32Array(width * height * 4);   // red, green, blue, share that is covered
    const edged = [];
    this.visible(plot, (i, x0, x1, y0, y1, row) => {
      if (y1 - y0 >= LOWEST && x1 - x0 >= LOWEST) edged.push([i, x0, x1, y0, y1, row]);
      const light = colours.light[this.groupOfBatch(i)];
      const left = Math.max(0, x0 - plot.left), right = Math.min(width, x1 - plot.left);
      const top = Math.max(0, y0 - plot.top), bottom = Math.min(height, y1 - plot.top);
      for (let y = Math.floor(top); y < bottom; y++) {
        const down = Math.min(y + 1, bottom) - Math.max(y, top);
        for (let x = Math.floor(left), at = (y * width + x) * 4; x < right; x++, at += 4) {
          const share = down * (Math.min(x + 1, right) - Math.max(x, left));
          sums[at] += share * light[0];
          sums[at + 1] += share * light[1];
          sums[at + 2] += share * light[2];
          sums[at + 3] += share;
        }
      }
    });
    const screen = new Uint8ClampedArray(4096);
    for (let i = 0; i < 4096; i++) screen[i] = Math.round(255 * (i / 4095) ** (1 / 2.2));
    const image = new ImageData(width, height), ended = this.x(this.plan.makespan, plot) - plot.left;
    for (let at = 0, x = 0; at < sums.length; at += 4, x = x + 1 === width ? 0 : x + 1) {
      const idle = Math.max(0, 1 - sums[at + 3]) * (x < ended);
      for (let channel = 0; channel < 3; channel++)
        image.data[at + channel] = screen[Math.min(4095, ((sums[at + channel] + idle * colours.idleLight[channel]) * 4095) | 0)];
      image.data[at + 3] = x < ended ? 255 : 0;
    }
    const picture = Object.assign(document.createElement("canvas"), { width, height });
    picture.getContext("2d").putImageData(image, 0, 0);
    this.context.drawImage(picture, plot.left, plot.top, plot.width, plot.height);
    this.context.strokeStyle = colours.paper;
    for (const [i, left, right, top, bottom, row] of edged) {
      this.context.lineWidth = clamp((bottom - top) / 12, 0.3, 1);
      this.context.strokeRect(left, top, right - left, bottom - top);
      this.label(plot, i, left, right, top, bottom, row);
    }
  }

  outline(plot) {
    const { context: c, plan } = this;
    if (this.selected === null) return;
    const i = plan.batch[this.selected];
    c.strokeStyle = this.theme.ink;
    c.lineWidth = 2;
    const members = plan.splits[i] ? [plan.firstMember[i], plan.firstMember[i + 1]] : [this.selected, this.selected + 1];
    for (let m = members[0], from = m; m < members[1]; m++) {
      if (m + 1 < members[1] && plan.row[m + 1] === plan.row[m] + 1) continue;
      const left = this.x(plan.begin[i], plot), top = this.y(plan.row[from], plot);
      c.strokeRect(left, top, Math.max(1, this.x(plan.end[i], plot) - left), Math.max(1, this.y(plan.row[m] + 1, plot) - top));
      from = m + 1;
    }
  }

  // Share of the ranks in view by what they do, below the plot and on its time axis.
  strip(plot) {
    const { context: c, theme: colours, view } = this, width = Math.round(plot.width), kinds = FIRST_OF_GROUP.length;
    const shares = new Float32Array(width * kinds), top = plot.top + plot.height + GAP, rows = view.r1 - view.r0;
    this.visible({ left: 0, top: 0, width, height: rows }, (i, x0, x1, y0, y1) => {
      const share = (Math.min(rows, y1) - Math.max(0, y0)) / rows, left = Math.max(0, x0), right = Math.min(width, x1), group = this.groupOfBatch(i);
      for (let x = Math.floor(left); x < right; x++) shares[x * kinds + group] += share * (Math.min(x + 1, right) - Math.max(x, left));
    });
    c.fillStyle = colours.idle;
    c.fillRect(plot.left, top, clamp(this.x(this.plan.makespan, plot) - plot.left, 0, plot.width), STRIP);
    for (let x = 0; x < width; x++)
      for (let group = kinds - 1, bottom = top + STRIP; group >= 0; group--) {
        const height = shares[x * kinds + group] * STRIP;
        if (height <= 0) continue;
        c.fillStyle = colours.groups[group];
        c.fillRect(plot.left + (x * plot.width) / width, bottom - height, plot.width / width + 0.3, height);
        bottom -= height;
      }
    c.fillStyle = colours.muted;
    c.textAlign = "right";
    for (const [text, y, base] of [["100%", top, "top"], ["of ranks", top + STRIP / 2, "middle"], ["0", top + STRIP, "bottom"]]) {
      c.textBaseline = base;
      c.fillText(text, plot.left - 6, y);
    }
  }

  axes(plot) {
    const { context: c, theme: colours, view } = this, bottom = plot.top + plot.height + GAP + STRIP;
    c.fillStyle = colours.muted;
    c.strokeStyle = colours.line;
    c.lineWidth = 1;
    c.textAlign = "right";
    c.textBaseline = "middle";
    const step = Math.max(1, 2 ** Math.ceil(Math.log2((16 * (view.r1 - view.r0)) / plot.height)));
    for (let row = Math.ceil(view.r0 / step) * step; row + 0.5 < view.r1; row += step) {
      const y = this.y(row + 0.5, plot);
      c.fillText(whole(row * this.plan.every), plot.left - 6, clamp(y, plot.top + 6, plot.top + plot.height - 6));
    }
    c.textBaseline = "top";
    const [size, unit] = [[1e9, "s"], [1e6, "ms"], [1e3, "µs"], [1, "ns"]].find(([size]) => view.t1 >= 2 * size) || [1, "ns"];
    const ticks = roundStep(((view.t1 - view.t0) / size) * (70 / plot.width), [1, 2, 5]);
    const digits = Math.max(0, -Math.floor(Math.log10(ticks) + 1e-9));
    for (let tick = Math.ceil(view.t0 / size / ticks); tick * ticks * size <= view.t1; tick++) {
      const x = this.x(tick * ticks * size, plot), text = `${(tick * ticks).toFixed(digits)} ${unit}`, half = c.measureText(text).width / 2;
      c.textAlign = "center";
      if (x < plot.left || x + half > plot.all) continue;
      c.fillText(text, x, bottom + 8);
      c.beginPath();
      c.moveTo(x, bottom);
      c.lineTo(x, bottom + 4);
      c.stroke();
    }
    c.textAlign = "center";
    c.fillText(this.canvas.dataset.along, plot.left + plot.width / 2, bottom + 26);
    c.save();
    c.translate(10, plot.top + plot.height / 2);
    c.rotate(-Math.PI / 2);
    c.fillText("rank", 0, -4);
    c.restore();
    const bound = this.x(this.bound, plot);
    if (bound >= plot.left && bound <= plot.left + plot.width) {
      c.beginPath();
      c.moveTo(bound, plot.top);
      c.lineTo(bound, bottom);
      c.strokeStyle = colours.paper;
      c.lineWidth = 3.5;
      c.stroke();
      c.strokeStyle = colours.bound;
      c.lineWidth = 1.5;
      c.setLineDash([5, 4]);
      c.stroke();
      c.setLineDash([]);
    }
  }
}
