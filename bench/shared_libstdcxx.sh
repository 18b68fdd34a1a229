# Sourced by bash, before anything that has inductor link C++: `source bench/shared_libstdcxx.sh`.
#
# A g++ that has libstdc++.a alone links it into each AOTInductor package, whose std::regex then calls the
# facets of the process's own libstdc++.so.6 and crashes (seen on the lent H200: parse_device_str, signal
# 11, with one nn.Linear and no attnplug). This puts a g++ in front that finds the shared library first.
_shared=/tmp/attnplug-libstdcxx
mkdir -p "$_shared"
ln -sf "$(ldconfig -p | awk '/libstdc\+\+\.so\.6 .*x86-64/ {print $NF; exit}')" "$_shared/libstdc++.so"
printf '#!/bin/sh\nexec %s -L%s "$@"\n' "$(command -v g++)" "$_shared" >"$_shared/g++"
chmod +x "$_shared/g++"
export PATH="$_shared:$PATH"
