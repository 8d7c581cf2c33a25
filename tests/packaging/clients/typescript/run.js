import { minute } from "./out/minute.js";

console.log(JSON.stringify(await minute(process.argv[2], process.argv[3])));
