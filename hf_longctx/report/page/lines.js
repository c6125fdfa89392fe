"use strict";
// Curves over optimizer steps: the numbers of the step under the pointer, and a line where it is.

function listenToLines(chart) {
  const { steps, series } = JSON.parse(chart.dataset.values), plot = chart.querySelector("svg"), line = chart.querySelector(".here");
  const first = steps[0], span = Math.max(1, steps[steps.length - 1] - first);
  let place = steps.length - 1;
  const show = (x, y) => {
    line.style.left = `${(100 * (steps[place] - first)) / span}%`;
    line.hidden = false;
    const said = series.filter(([, values]) => values[place] !== null).map(([name, values]) => `${name}: ${values[place]}`);
    showTip([`Step ${whole(steps[place])}`, ...said], x, y);
  };
  const hide = () => { line.hidden = true; hideTip(); };
  plot.addEventListener("pointermove", (event) => {
    const box = plot.getBoundingClientRect(), wanted = first + ((event.clientX - box.left) / box.width) * span;
    place = steps.reduce((best, step, i) => (Math.abs(step - wanted) < Math.abs(steps[best] - wanted) ? i : best), 0);
    show(event.clientX, event.clientY);
  });
  plot.addEventListener("pointerleave", hide);
  plot.addEventListener("blur", hide);
  plot.addEventListener("keydown", (event) => {
    if (event.key === "Escape") return hide();
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    place = clamp(place + (event.key === "ArrowRight" ? 1 : -1), 0, steps.length - 1);
    const box = plot.getBoundingClientRect();
    show(box.left + ((steps[place] - first) / span) * box.width, box.top + box.height / 2);
    event.preventDefault();
  });
}

document.querySelectorAll(".lines-chart").forEach(listenToLines);
