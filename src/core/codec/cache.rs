//! A bounded least-recently-used cache of linear maps, keyed by the columns they lead from and to. Invariant:
//! neither the number of maps nor the bytes of their tables exceed the limits, except that one map larger
//! than the limit is kept alone. Must not know how a map is made or applied.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::{Arc, Mutex, PoisonError};

use super::engine::LinearMap;

/// Most maps kept. While members are missing, every rotation of the stripe has a pattern of its own, at most
/// 255, and the array asks for a few subsets of each.
const MAPS_MAX: usize = 1024;

/// Most bytes of tables kept: all rotations of 20+10 with every parity missing take 50 KiB; tables of the
/// largest codes are cheaper to make again than to keep.
const TABLE_BYTES_MAX: usize = 4 << 20;

/// See the module's head. Shared by the clones of a codec.
#[derive(Debug, Default)]
pub(super) struct MapCache {
    entries: Mutex<Entries>,
}

#[derive(Debug, Default)]
struct Entries {
    maps: HashMap<Box<[u8]>, Entry, BuildHasherDefault<ColumnHasher>>,
    table_bytes: usize,
    clock: u64,
}

#[derive(Debug)]
struct Entry {
    map: Arc<LinearMap>,
    used: u64,
}

/// Multiply and fold, eight bytes at a time. Keys are columns that the array chose, not bytes that a client
/// could choose to collide, and the standard hash would cost as much as coding a row of a small code.
#[derive(Debug, Default)]
struct ColumnHasher(u64);

impl Hasher for ColumnHasher {
    fn write(&mut self, bytes: &[u8]) {
        for piece in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..piece.len()].copy_from_slice(piece);
            // An odd constant with no pattern in its bits: 2^64 over the golden ratio.
            let wide = u128::from(self.0 ^ u64::from_le_bytes(word)) * 0x9E37_79B9_7F4A_7C15;
            self.0 = wide as u64 ^ (wide >> 64) as u64;
        }
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

impl MapCache {
    /// The map stored under `key`; if there is none, stores and returns the one that `make` returns.
    pub(super) fn get_or_insert(&self, key: &[u8], make: impl FnOnce() -> LinearMap) -> Arc<LinearMap> {
        if let Some(map) = self.lock().get(key) {
            return map;
        }
        // Made outside the lock: two threads may make the same map, which costs less than making others wait.
        let map = Arc::new(make());
        self.lock().insert(key, Arc::clone(&map));
        map
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Entries> {
        // No code that can panic runs under the lock, and a torn cache could at worst miss.
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Entries {
    fn get(&mut self, key: &[u8]) -> Option<Arc<LinearMap>> {
        self.clock += 1;
        let entry = self.maps.get_mut(key)?;
        entry.used = self.clock;
        Some(Arc::clone(&entry.map))
    }

    fn insert(&mut self, key: &[u8], map: Arc<LinearMap>) {
        self.table_bytes += map.table_bytes();
        let entry = Entry { map, used: self.clock };
        if let Some(replaced) = self.maps.insert(key.into(), entry) {
            self.table_bytes -= replaced.map.table_bytes();
        }
        while self.maps.len() > 1 && (self.maps.len() > MAPS_MAX || self.table_bytes > TABLE_BYTES_MAX) {
            self.evict_oldest();
        }
    }

    /// A linear scan: it runs only on a miss in a full cache, where a map is made anyway.
    fn evict_oldest(&mut self) {
        let oldest = self.maps.iter().min_by_key(|(_, entry)| entry.used).map(|(key, _)| key.clone());
        if let Some(removed) = oldest.and_then(|key| self.maps.remove(&key)) {
            self.table_bytes -= removed.map.table_bytes();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::engine::Kernel;
    use std::hash::BuildHasher;

    use super::*;

    fn map(outputs: usize) -> LinearMap {
        LinearMap::new(Kernel::Portable, &vec![1; outputs], 1)
    }

    #[test]
    fn keys_of_neighbouring_patterns_spread_over_a_table() {
        let hash = |key: &[u8]| BuildHasherDefault::<ColumnHasher>::default().hash_one(key);
        let mut low = std::collections::HashSet::new();
        let mut high = std::collections::HashSet::new();
        for n in 0..256u32 {
            // Twelve columns of which one is missing or moved: what rotation asks for.
            let mut key: Vec<u8> = (0..12).collect();
            key[(n % 12) as usize] ^= (n / 12) as u8;
            low.insert(hash(&key) & 0xFFF);
            high.insert(hash(&key) >> 57);
        }
        assert!(low.len() > 200 && high.len() > 90, "{} of 256, {} of 128", low.len(), high.len());
    }

    #[test]
    fn a_map_is_made_once_while_it_stays() {
        let cache = MapCache::default();
        let first = cache.get_or_insert(b"a", || map(1));
        let second = cache.get_or_insert(b"a", || panic!("the map is in the cache"));
        assert!(Arc::ptr_eq(&first, &second));
    }

    #[test]
    fn the_number_of_maps_is_bounded_and_the_least_recently_used_goes() {
        let cache = MapCache::default();
        for n in 0..=MAPS_MAX as u32 {
            cache.get_or_insert(&n.to_le_bytes(), || map(1));
            cache.get_or_insert(&0u32.to_le_bytes(), || panic!("used all the time, yet evicted"));
        }
        let entries = cache.lock();
        assert_eq!(entries.maps.len(), MAPS_MAX);
        assert!(!entries.maps.contains_key(&1u32.to_le_bytes()[..]));
        assert_eq!(entries.table_bytes, MAPS_MAX);
    }

    #[test]
    fn the_bytes_of_tables_are_bounded() {
        let cache = MapCache::default();
        for n in 0..10u8 {
            cache.get_or_insert(&[n], || map(TABLE_BYTES_MAX / 4));
        }
        assert_eq!(cache.lock().maps.len(), 4);
        cache.get_or_insert(b"huge", || map(TABLE_BYTES_MAX * 2));
        assert_eq!(cache.lock().maps.len(), 1);
    }
}
