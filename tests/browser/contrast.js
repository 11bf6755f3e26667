// Every visible text against what lies behind it, as WCAG 2 computes it; large text needs less.
(() => {
  const rgb = (text) => {
    const found = (text.match(/[\d.]+/g) ?? []).map(Number);
    return text.startsWith("color(srgb") ? found.map((c, i) => (i < 3 ? c * 255 : c)) : found;
  };
  const luminance = (colour) => {
    const [r, g, b] = colour.map((c) => {
      const part = c / 255;
      return part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    let [r, g, b, solid] = [0, 0, 0, 0];
    for (let at = element; at && solid < 0.99; at = at.parentElement) {
      const [x, y, z, alpha = 1] = rgb(getComputedStyle(at).backgroundColor);
      const left = alpha * (1 - solid);
      [r, g, b, solid] = [r + x * left, g + y * left, b + z * left, solid + left];
    }
    return [r, g, b].map((c) => c + 255 * (1 - solid));
  };
  const bad = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const text = walker.currentNode.data.trim();
    const element = walker.currentNode.parentElement;
    if (!text || element.closest("script, style, noscript, option, svg, button:disabled")) continue;
    if (!element.checkVisibility() || element.closest("[aria-hidden=true]")) continue;
    const style = getComputedStyle(element);
    const back = behind(element);
    let opacity = 1;
    for (let at = element; at; at = at.parentElement) opacity *= Number(getComputedStyle(at).opacity);
    const ink = rgb(style.color).slice(0, 3).map((c, i) => c * opacity + back[i] * (1 - opacity));
    const [light, dark] = [luminance(ink), luminance(back)].sort((a, b) => b - a);
    const ratio = (light + 0.05) / (dark + 0.05);
    const size = parseFloat(style.fontSize);
    const large = size >= 24 || (size >= 18.6 && Number(style.fontWeight) >= 700);
    if (ratio < (large ? 3 : 4.5)) bad.push(`${text.slice(0, 30)}: ${ratio.toFixed(2)}`);
  }
  return bad;
})();
