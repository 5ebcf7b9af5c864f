"use strict";
// Unpacks the numbers and sets up each part.

async function main() {
  if (typeof DecompressionStream === "undefined") throw new Error("this browser is too old: it lacks DecompressionStream (Chrome 80, Firefox 113, Safari 16.4)");
  const { numbers, data } = await unpack($("numbers").textContent.trim());
  const { devices } = numbers;
  state.device = devices.find((device) => device.name === "H200");
  options($("device"), devices.map((device) => [device.name, device.title]), state.device.name);
  $("device").addEventListener("change", () => {
    state.device = devices.find((device) => device.name === $("device").value);
    for (const listener of listeners) listener(state.device);
  });
  memoryPart();
  tripsPart(numbers.trips);
  softmaxPart();
  tilingPart(numbers, data);
  backwardPart(numbers.paper);
  curvesPart(numbers);
  sparsePart(numbers.sparse);
  resultsPart(numbers.runs, numbers.series);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawCharts);
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth !== width) redrawCharts(); // a phone's address bar changes the height alone
    width = innerWidth;
  });
  $(location.hash.slice(1))?.scrollIntoView(); // its place is known only now
  document.documentElement.dataset.ready = "yes";
}

main().catch((error) => {
  $("failed").hidden = false;
  $("failed").textContent = `The page could not be set up: ${error.message}.`;
  throw error;
});
