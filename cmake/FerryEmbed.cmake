# SPDX-License-Identifier: Apache-2.0
# Run at build time: writes INPUT as a C array SYMBOL with a NUL to OUTPUT.
file(READ "${INPUT}" bytes HEX)
string(REGEX REPLACE "(................................)" "\\1\n" bytes
    "${bytes}")
string(REGEX REPLACE "([0-9a-f][0-9a-f])" "0x\\1," bytes "${bytes}")
file(WRITE "${OUTPUT}" "/* Made from a file of the source tree. */
extern const char ${SYMBOL}[];
const char ${SYMBOL}[] = {
${bytes}0};
")
